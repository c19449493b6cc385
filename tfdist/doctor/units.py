"""Numbers for people."""


def format_bytes(count: float) -> str:
    """Returns a number of bytes.

    >>> format_bytes(999), format_bytes(50_123_456)
    ('999 B', '50.1 MB')
    """
    return _scaled(count, "B")


def format_rate(bytes_per_second: float) -> str:
    """Returns a bandwidth in bits a second, as networks are sold.

    >>> format_rate(12_500_000)
    '100.0 Mbit/s'
    """
    return _scaled(8 * bytes_per_second, "bit/s")


def format_seconds(seconds: float) -> str:
    """Returns a short duration.

    >>> format_seconds(0.00002), format_seconds(0.0021), format_seconds(0.4), format_seconds(12.3)
    ('20 µs', '2.10 ms', '400 ms', '12.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    milliseconds = 1000 * seconds
    if milliseconds < 1:
        return f"{1000 * milliseconds:.0f} µs"
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f} ms"


def format_count(count: int) -> str:
    """Returns a number of parameters.

    >>> format_count(10_000_000), format_count(1_500_000_000), format_count(12)
    ('10M', '1.5G', '12')
    """
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _scaled(amount: float, unit: str) -> str:
    prefix = ""
    for prefix in ("", "k", "M", "G", "T"):
        if amount < 999.95 or prefix == "T":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if not prefix else f"{amount:.1f} {prefix}{unit}"
