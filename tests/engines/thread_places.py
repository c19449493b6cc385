"""An engine whose places are threads of this process, for tests of what all engines share."""

import concurrent.futures

from tfdist.launch.engines.place import place_address, run_place


def run_in_threads(call, *, show=print, should_stop=lambda: False):
    """Runs a round; `show` gets all lines."""
    addresses = [place_address("127.0.0.1") for _ in range(call.workers)]
    with concurrent.futures.ThreadPoolExecutor(call.workers) as pool:
        places = [
            pool.submit(run_place, call.task(rank, addresses, threads=1), show=show, should_stop=should_stop)
            for rank in range(call.workers)
        ]
        return [place.result(120) for place in places]
