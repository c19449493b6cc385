"""An engine whose places are threads of this process, for tests of what all engines share."""

import concurrent.futures

from tfdist.launch.engines.engine_call import RoundEnd
from tfdist.launch.engines.place import place_address, run_place, stop_places


def run_in_threads(call, *, show=print, should_stop=lambda: False, on_addresses=lambda addresses: None):
    """Runs a round; `show` gets all lines, and `on_addresses` the addresses before the places start."""
    addresses = [place_address("127.0.0.1") for _ in range(call.spec.workers)]
    on_addresses(addresses)
    end, results = RoundEnd(call), []
    with concurrent.futures.ThreadPoolExecutor(call.spec.workers) as pool:
        places = [
            pool.submit(run_place, call.task(rank, addresses, threads=1), show=show, should_stop=should_stop)
            for rank in range(call.spec.workers)
        ]
        for place in concurrent.futures.as_completed(places, 120):
            if place.exception() is None:
                results.append(place.result())
            if place.exception() is not None or end.has_come(results):
                stop_places(call.run)
        return [place.result() for place in places]
