"""The order that a graph prescribes."""


def ancestors(operation):
    """What an operation waits for."""
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        for other in [*(tensor.op for tensor in one.inputs), *one.control_inputs]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
