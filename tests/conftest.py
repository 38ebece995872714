"""What every test gets: a working directory of its own, and a quiet Flower."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    # A run writes events.jsonl where it is started.
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def quiet_flower():
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
