import dataclasses

import pytest
from planned_programs import program

from tfdist.planning.cost_terms import Conditions
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.plan_table import plan_name, to_lines
from tfdist.planning.search import TIE, find_plans

GIGABIT, SLOW = LinkSpeed.ethernet(1e9, 1e-4), LinkSpeed.ethernet(1e7, 1e-3)
FITS = 10**12


def plans(link=GIGABIT, memory=FITS, workers=4, measured=None, **allowed):
    return find_plans(measured or program(), Conditions(link, memory, **allowed), workers)


def test_without_permission_all_plans_are_exact():
    found = plans()
    assert found.plans and not found.too_large
    assert all(plan.exact and plan.compression is None and "sync_every" not in plan.code for plan in found.plans)
    modes = {plan.strategy.arguments.get("mode", {"class": ""})["class"] for plan in found.plans}
    assert modes == {"", "Synchronous"}


def test_permissions_add_plans():
    compressed, local = plans(allow_compression=True).plans, plans(allow_local_updates=True).plans
    assert {plan.compression for plan in compressed} == {None, "bf16", "int8", "topk:0.01", "powersgd:4"}
    assert not any("sync_every" in plan.code for plan in compressed)
    assert all(plan.compression is None for plan in local)
    names = {plan_name(plan) for plan in local if not plan.exact}
    assert {"LocalSGD every 20", "DiLoCo every 50", "1 parameter server, asynchronous"} <= names
    assert any(plan.gradient_accumulation_steps == 4 for plan in local)


def test_short_epochs_have_no_local_updates():
    found = plans(measured=program(samples=64 * 30), allow_local_updates=True).plans
    assert not any("sync_every" in plan.code for plan in found)


def test_the_fastest_is_first_but_for_ties():
    found = plans(allow_compression=True, allow_local_updates=True).plans
    # The time of a chief is not measured.
    have_chief = [plan.has_chief or plan.parameter_servers > 0 for plan in found]
    assert any(have_chief) and have_chief == sorted(have_chief)
    for kind in (False, True):
        compared = [plan.step_seconds for plan, has_chief in zip(found, have_chief, strict=True) if has_chief == kind]
        for index, seconds in enumerate(compared):
            assert seconds <= (1 + TIE) * min(compared[index:])


def test_ties_prefer_the_simpler_plan():
    # Without a limit on the link, and with methods that cost nothing, all data parallel plans take equally long.
    measured = program(is_functional=False)
    free = tuple(
        dataclasses.replace(one, compute_seconds=0.0, collectives=measured.program.exchanges[0].collectives)
        for one in measured.program.exchanges
    )
    steps = tuple(step for step in measured.program.steps if not step.compiled)
    measured = dataclasses.replace(
        measured, program=dataclasses.replace(measured.program, exchanges=free, steps=steps, slot_bytes=0)
    )
    first = plans(LinkSpeed(1e15), measured=measured, workers=2, allow_compression=True).plans[0]
    assert plan_name(first) == "data parallel"


def test_a_plan_that_is_two_per_cent_faster_is_not_worth_its_price():
    measured = program(is_functional=False, slots=0)
    steps = tuple(
        dataclasses.replace(step, seconds=step.seconds * 0.98 / 0.9) if step.compiled else step
        for step in measured.program.steps
    )
    measured = dataclasses.replace(measured, program=dataclasses.replace(measured.program, steps=steps))
    first, second = plans(workers=1, measured=measured).plans
    assert (plan_name(first), plan_name(second)) == ("one worker", "one worker, XLA")
    assert second.step_seconds < first.step_seconds


def test_a_slow_link_needs_compression_or_local_updates():
    best = plans(SLOW, allow_compression=True, measured=program(is_functional=False)).plans[0]
    assert best.compression == "powersgd:4"
    best = plans(SLOW, allow_compression=True, allow_local_updates=True, measured=program(is_functional=False)).plans[0]
    assert best.strategy.arguments["mode"]["class"] == "DiLoCo"


def test_what_does_not_fit_is_left_out_with_its_excess():
    everything = plans()
    memory = sorted(plan.memory_bytes for plan in everything.plans)[len(everything.plans) // 2]
    found = plans(memory=memory)
    assert len(found.plans) + len(found.too_large) == len(everything.plans)
    assert all(plan.memory_bytes <= memory for plan in found.plans)
    excess = [missing for _, missing in found.too_large]
    assert excess == sorted(excess) and excess[0] > 0
    assert all(plan.memory_bytes - memory == pytest.approx(missing, abs=1) for plan, missing in found.too_large)


def test_memory_that_is_short_leads_to_sharded_slots():
    measured = program(is_functional=False)
    options = plans(measured=measured).plans
    plain = next(plan for plan in options if plan_name(plan) == "data parallel")
    found = plans(measured=measured, memory=plain.memory_bytes - 10**6).plans
    assert all("sharded slots" in plan_name(plan) or "parameter" in plan_name(plan) for plan in found)


def test_one_worker_has_one_plan_for_each_compiler():
    assert [plan_name(plan) for plan in plans(workers=1).plans] == ["one worker, XLA", "one worker"]


def test_load_balancing_is_planned_for_workers_of_different_speeds():
    measured = program(fixed_seconds=0.005, row_seconds=0.002)
    equal, uneven = (
        plans(LinkSpeed(1e12), workers=2, measured=measured, speeds=speeds) for speeds in ((1.0, 1.0), (1.0, 0.5))
    )
    assert not any("load_balancing" in plan.code for plan in equal.plans)
    found = {plan_name(plan): plan for plan in uneven.plans}
    assert found["data parallel, balanced rows"].step_seconds < 0.9 * found["data parallel"].step_seconds


def test_reasons_name_what_bounds_the_step():
    reasons = {plan_name(plan): plan.reason for plan in plans(SLOW, workers=2, allow_compression=True).plans}
    assert reasons["data parallel"].startswith("the link is busy 34.0 s of 34.")
    assert reasons["data parallel, int8"].endswith("; sends 1/3.9 of the dense gradients")
    unlimited = {plan_name(plan): plan.reason for plan in plans(LinkSpeed(1e12), workers=2).plans}
    assert unlimited["data parallel"].startswith("encoding and copies take the cores")
    assert any(reason.startswith("computation takes") for reason in unlimited.values())


def test_prices_are_said():
    found = {plan_name(plan): plan for plan in plans(allow_compression=True, allow_local_updates=True).plans}
    assert found["data parallel"].accuracy == "exact: the numbers of one process, up to rounding"
    assert found["data parallel, bf16"].accuracy == "gradients are off by 0.2 %"
    assert "at first; what is left out is added to the next ones" in found["data parallel, topk:0.01"].accuracy
    assert "workers train apart for 20 updates" in found["LocalSGD every 20"].accuracy
    assert "up to about 3 updates old" in found["1 parameter server, asynchronous"].accuracy


def test_the_table_is_narrow_and_says_what_does_not_fit():
    found = plans(memory=620 * 10**6, workers=8, allow_compression=True, allow_local_updates=True)
    lines = to_lines(found.plans, found.too_large, rows=64, link=GIGABIT, memory_bytes=620 * 10**6)
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("8 workers, each with 941.5 Mbit/s and 100 µs; 64 samples in a step; the best 10 of ")
    assert "Do not fit into 620.0 MB of a worker:" in lines
    assert any(line.startswith("  data parallel") and line.endswith(" too much") for line in lines)
    assert sum(line.startswith("   Price: ") for line in lines) == 10


def test_the_table_of_a_slurm_step_starts_the_plans_there():
    found = plans(workers=2)
    lines = to_lines(found.plans, found.too_large, rows=64, link=GIGABIT, memory_bytes=10**12, cluster="Slurm")
    commands = {line.strip() for line in lines if line.startswith("     $ ")}
    assert "$ srun --ntasks=2 python train.py" in commands
    assert all("srun" in command or "with --nodes" in command for command in commands)


@pytest.mark.parametrize("workers", [2, 64, 4096])
def test_all_numbers_of_workers_have_plans(workers):
    found = plans(workers=workers, measured=program(rows=4096), allow_compression=True, allow_local_updates=True)
    assert found.plans and all(0 < plan.step_seconds < 1e4 for plan in found.plans)
