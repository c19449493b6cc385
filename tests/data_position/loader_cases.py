"""Loaders of the ids of `data_runs`: arguments of `fit`."""

from counted_samples import Samples, itself
from data_runs import BATCH, IDS


def unthreaded(grain):
    """Options with which Grain reads when a batch is drawn, so that the reads can be counted."""
    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def shuffled(grain):
    return grain.MapDataset.source(Samples(IDS, itself)).seed(3).shuffle()


def data_loader(grain, seed=3, **options):
    """A `DataLoader` of Grain."""
    unsharded = grain.sharding.NoSharding()
    order = grain.samplers.IndexSampler(len(IDS), shard_options=unsharded, shuffle=True, num_epochs=1, seed=seed)
    given = {"data_source": Samples(IDS, itself), "sampler": order, "operations": [grain.transforms.Batch(BATCH)]}
    return grain.DataLoader(**given, read_options=unthreaded(grain), **options)


GRAIN = {
    "MapDataset": lambda grain: {"x": shuffled(grain).batch(BATCH)},
    "IterDataset": lambda grain: {"x": shuffled(grain).to_iter_dataset(unthreaded(grain)).batch(BATCH)},
    "IterDataset repeated over epochs": lambda grain: {
        "x": shuffled(grain).repeat().to_iter_dataset(unthreaded(grain)).batch(BATCH),
        "steps_per_epoch": 4,
    },
    "DataLoader": lambda grain: {"x": data_loader(grain)},
    "DataLoader over epochs": lambda grain: {"x": data_loader(grain), "steps_per_epoch": 4},
}

GRAIN_WITH_PROCESSES = {
    "DataLoader": lambda grain: {"x": data_loader(grain, worker_count=2)},
    "IterDataset": lambda grain: {
        "x": shuffled(grain)
        .batch(BATCH)
        .to_iter_dataset()
        .mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=2))
    },
}


def stateful(torchdata, of_sample=None, *, has_generator=True, **options):
    """A `StatefulDataLoader` that shuffles, with a generator of its own or by the global one."""
    torch, loader = torchdata
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(1) if has_generator else None
    samples = Samples(IDS, of_sample or (lambda number: (torch.tensor(int(number)),)))
    return loader(samples, **{"batch_size": BATCH, "shuffle": True, "generator": generator, **options})


# By case: arguments of `fit`, options of the loader.
TORCH = {
    "shuffled": ({}, {}),
    "shuffled by the global generator": ({}, {"has_generator": False}),
    "over epochs": ({"steps_per_epoch": 4}, {}),
    "two steps an execution": ({"steps_per_execution": 2}, {}),
}


def torch_case(case, torchdata, **options):
    of_fit, of_loader = TORCH[case]
    return {"x": stateful(torchdata, **of_loader, **options), **of_fit}
