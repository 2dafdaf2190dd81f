"""How the kernels refuse arguments."""


def require(ok: bool, what: str) -> None:
    """Raise ValueError, which says what was expected, unless ``ok``."""
    if not ok:
        raise ValueError(what)
