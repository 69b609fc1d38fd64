"""Makes the many exports in tests cheaper; changes nothing that they test."""

import gc

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes out of the garbage collector's sight what torch has loaded: looking through it takes a tenth of
    the time of an export. What tests make is collected as ever."""
    import torch._dynamo  # noqa: F401  (loaded by the first export anyway)

    gc.collect()
    gc.freeze()
