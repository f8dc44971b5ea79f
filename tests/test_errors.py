"""The exception tree: what the docstring draws is what the classes are."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re
import textwrap

import pytest

from ray_jax_ckpt import errors

_CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and value.__module__ == errors.__name__ and not name.startswith("_")
}
_LINE = re.compile(r"^(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: +\((?P<builtin>\w+)\) +\S.*)?$")


def _drawn() -> dict[str, tuple[str | None, str | None]]:
    """The tree of the docstring: class name to (name of its parent in the tree, name of the builtin it also is)."""
    body = textwrap.dedent((errors.__doc__ or "").split("::\n", 1)[1])
    parents: list[str] = []
    drawn: dict[str, tuple[str | None, str | None]] = {}
    for line in filter(None, map(str.rstrip, body.splitlines())):
        found = _LINE.match(line)
        assert found, f"not a line of the tree: {line!r}"
        depth = len(found["branch"]) // 4
        del parents[depth:]
        assert found["name"] not in drawn, f"drawn twice: {found['name']}"
        drawn[found["name"]] = (parents[-1] if parents else None, found["builtin"])
        parents.append(found["name"])
    return drawn


_DRAWN = _drawn()
_BELOW_ROOT = sorted(set(_DRAWN) - {"CheckpointError"})


def test_tree_draws_every_class_and_nothing_else() -> None:
    assert set(_DRAWN) == set(_CLASSES)


def test_root_is_a_plain_exception() -> None:
    assert _DRAWN["CheckpointError"] == (None, None)
    assert errors.CheckpointError.__bases__ == (Exception,)


@pytest.mark.parametrize("name", _BELOW_ROOT)
def test_parent_in_tree_is_the_nearest_base_of_this_package(name: str) -> None:
    parent = next(base for base in _CLASSES[name].__mro__[1:] if base.__module__ == errors.__name__)
    assert parent.__name__ == _DRAWN[name][0]


@pytest.mark.parametrize("name", _BELOW_ROOT)
def test_is_the_builtin_that_a_caller_would_catch(name: str) -> None:
    builtin = _DRAWN[name][1]
    assert builtin is not None, f"{name} names no builtin"
    with pytest.raises(getattr(builtins, builtin), match=re.escape("step 7: why")):
        raise _CLASSES[name]("step 7: why")


@pytest.mark.parametrize("name", sorted(_CLASSES))
def test_pickles_with_message_and_type(name: str) -> None:
    error = _CLASSES[name]("asked for 2 copies / found 1 node / add a node")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert str(copy) == "asked for 2 copies / found 1 node / add a node"


@pytest.mark.parametrize("name", sorted(_CLASSES))
def test_says_in_its_own_docstring_what_it_means(name: str) -> None:
    assert _CLASSES[name].__doc__ not in (None, "", *(base.__doc__ for base in _CLASSES[name].__mro__[1:]))


def test_one_handler_catches_all() -> None:
    assert all(issubclass(each, errors.CheckpointError) for each in _CLASSES.values())
