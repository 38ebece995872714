"""Flower strategies as things to wrap: which can be, and what they are set to.

A strategy may itself wrap another one, as Flower's differential-privacy wrappers do.
"""

from typing import Any

from flwr.serverapp.strategy import FedXgbCyclic, Strategy


def check_wrappable(strategy: Strategy) -> None:
    """Refuse a strategy that cannot work on updates of different versions.

    Raises
    ------
    TypeError
        If it is not a Flower message-API strategy.
    ValueError
        If its rule has no meaning here, with what to use instead.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "inner must be a flwr.serverapp.strategy.Strategy (message API), got "
            f"{type(strategy).__module__}.{type(strategy).__name__}"
        )
    if isinstance(strategy, FedXgbCyclic):
        raise ValueError(
            "FedXgbCyclic passes one model from client to client, so there is nothing "
            "to merge asynchronously; use it unwrapped"
        )
    inner = getattr(strategy, "strategy", None)
    if isinstance(inner, Strategy):
        check_wrappable(inner)


def setting(strategy: Strategy, name: str, default: Any) -> Any:
    """Return a setting of the strategy or of the one that it wraps itself."""
    value = getattr(strategy, name, None)
    if value is not None:
        return value
    wrapped = getattr(strategy, "strategy", None)
    return setting(wrapped, name, default) if wrapped is not None else default


def nodes_to_train(strategy: Strategy) -> int:
    """Return how many nodes it must see before it makes train messages."""
    names = ("min_available_nodes", "min_train_nodes", "num_sampled_clients")
    return _largest(strategy, names)


def nodes_to_evaluate(strategy: Strategy) -> int:
    """Return how many nodes it must see before it makes evaluate messages."""
    return _largest(strategy, ("min_available_nodes", "min_evaluate_nodes"))


def _largest(strategy: Strategy, names: tuple[str, ...]) -> int:
    largest: int = max(1, *(setting(strategy, name, 1) for name in names))
    return largest
