"""Metrics as training has them, made into what can be stored: `to_metrics`. Imports neither JAX nor Ray."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ray_jax_ckpt.errors import ConfigError
from ray_jax_ckpt.model.metrics import NONFINITE, encode, find, locate, score_of
from ray_jax_ckpt.values import with_article

logger = logging.getLogger(__name__)

MAX_DEPTH = 32
MAX_INT_BITS = 1024
MAX_TEXT = 1000
_KINDS: tuple[tuple[re.Pattern[str], Callable[[Any], Any]], ...] = (
    (re.compile(r"bool_?"), bool),
    (re.compile(r"u?int\d+"), int),
    (re.compile(r"b?float\d+\w*"), float),
)


def to_metrics(metrics: Mapping[str, Any], *, score: str | None = None) -> dict[str, Any]:
    """Metrics as plain Python values, for `ray.train.report` or anybody who writes them down.

    Ray keeps what it is given in a state that takes plain values only: `ray.train.report({"loss": jnp.float32(1)})`
    ends a run. Scalars of NumPy and JAX become Python numbers (and are fetched from the devices), tuples lists,
    mappings dictionaries; numbers, text, bools, None and lists stay. NaN and infinities stay what they are, and Ray's
    state has null for them. Only of the metric that Ray ranks checkpoints by it must not be so, since Ray cannot rank a
    null when the run is started again: such a score that is no finite number is left out, which ranks worst, and stands
    as text in `metrics["rjc_nonfinite"]`, by its name.

    Args:
        metrics: By name; nested ones as well.
        score: The metric that Ray ranks by. None: in a train function what `CheckpointConfig` says, elsewhere none.

    Raises:
        ConfigError: A value cannot be stored; the message has its name. So has one for a score that is text.
    """
    score = _score_of_run() if score is None else score
    plain = stored(metrics, score=score)
    place = None if score is None else locate(plain, score)
    if place is None or score_of(*place) is not None:
        return plain
    holder, name = place
    found = holder.pop(name)
    return {**plain, NONFINITE: {score: encode(found)}}


def stored(metrics: Mapping[str, Any], *, defer: bool = False, score: str | None = None) -> dict[str, Any]:
    """Metrics as plain Python values, NaN and infinities included.

    Args:
        metrics: By name.
        defer: Whether scalars that are not in this process's memory yet stay as they are, for a later call.
        score: Name of one that has to be a number, or None.

    Raises:
        ConfigError: A value cannot be stored; the message has its name.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics takes a dictionary by name, got {metrics!r:.200}.")
    plain = _plain(metrics, "", defer, 0)
    if score is not None and isinstance(find(plain, score), str | list | dict):
        raise ConfigError(
            f"Checkpoints are ranked by the metric {score!r}, which must be a number: got {find(plain, score)!r:.100}. "
            "Give a number, or name another metric to rank by."
        )
    return plain


def kept(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """As `stored`, where it is too late to refuse anything: what cannot be stored is kept as text."""
    plain: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            plain |= stored({name: value})
        except Exception as error:
            # Values of users raise what they like.
            said = name if _is_text(name) else _as_text(name)[:200]
            logger.warning("The metric %r is kept as text: %s", said, error)
            plain[said] = _as_text(value)
    return plain


def _is_text(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(_text(name, "names"))
    except ConfigError:
        return False


def _as_text(value: Any) -> str:
    try:
        return ascii(value)[:MAX_TEXT]
    except Exception as error:
        # Of an integer that has very many digits too.
        return f"{type(value).__name__} that cannot be shown ({type(error).__name__})"


def _plain(value: Any, path: str, defer: bool, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"The metric {path!r:.200} is nested more than {MAX_DEPTH} deep, or holds itself.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, Mapping):
        return {_name(name, path): _plain(one, _join(path, name), defer, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, _join(path, n), defer, depth + 1) for n, one in enumerate(value)]
    if isinstance(value, int):
        return _whole_number(value, path)
    return float(value) if isinstance(value, float) else _scalar(value, path, defer)


def _scalar(value: Any, path: str, defer: bool) -> Any:
    """A scalar of NumPy, or of whoever has `shape` and `dtype`."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise ConfigError(
            f"The metric {path!r} is {with_article(type(value).__name__)}, which cannot be stored: give numbers, text, "
            "bools, None, or lists and dictionaries of them, such as str(value)."
        )
    if tuple(shape) != ():
        raise ConfigError(
            f"The metric {path!r} is an array of shape {tuple(shape)}, which cannot be stored. Give a number, such as "
            "its mean, or value.tolist()."
        )
    kind = getattr(dtype, "name", str(dtype)).rpartition(".")[2]
    make = next((make for pattern, make in _KINDS if pattern.fullmatch(kind)), None)
    if make is None:
        raise ConfigError(f"The metric {path!r} is a scalar of {dtype}, which cannot be stored. Give a real number.")
    # NumPy's may be changed in place; others have to be fetched first, which is not for everybody's thread.
    return value if defer and not isinstance(value, np.ndarray | np.generic) else make(value)


def _whole_number(value: int, path: str) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise ConfigError(f"The metric {path!r} is an integer of {value.bit_length()} bits; {MAX_INT_BITS} are stored.")
    return int(value)


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The metric {path!a} holds text that is not Unicode: {error}.") from None
    # Of a subclass too it is plain text.
    return "".join((value,))


def _name(name: Any, path: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"Metrics have names that are text: got {name!r:.100}{f' in {path!r}' if path else ''}.")
    return _text(name, path or "names")


def _join(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def _score_of_run() -> str | None:
    """What Ray ranks the checkpoints of this worker's run by. Outside of Ray Train this costs no import."""
    if "ray.train.v2._internal.execution.context" not in sys.modules:
        return None
    from ray_jax_ckpt import _ray_compat

    return _ray_compat.score_attribute()
