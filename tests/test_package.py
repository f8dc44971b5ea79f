"""The package as a whole: what importing it costs, what it exports, what is shipped."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import packaging.requirements
import packaging.utils
import packaging.version
import pytest

import ray_jax_ckpt

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / "ray_jax_ckpt"


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=_ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_heavy_package() -> None:
    loaded = _run("import sys, ray_jax_ckpt; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert {"flax", "jax", "jaxlib", "numpy", "optax", "orbax", "pyarrow", "pydantic", "ray"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("errors", ["jax", "orbax", "flax", "ray", "pyarrow"]),
        ("SnapshotConfig", ["jax", "orbax", "flax", "ray", "pyarrow"]),
        ("CheckpointManager", ["jax", "jaxlib", "orbax", "flax"]),
        ("JaxConfig", ["jax", "jaxlib", "orbax", "flax"]),
    ],
)
def test_name_used_by_a_driver_loads_no_accelerator_library(name: str, absent: list[str]) -> None:
    loaded = _run(f"import sys, ray_jax_ckpt; ray_jax_ckpt.{name}; print(*sys.modules)").split()
    assert not {each for each in absent if each in loaded}


def test_all_is_what_is_importable() -> None:
    names: dict[str, object] = {}
    exec("from ray_jax_ckpt import *", names)
    del names["__builtins__"]
    assert sorted(names) == sorted(ray_jax_ckpt.__all__)
    assert set(ray_jax_ckpt.__all__) <= set(dir(ray_jax_ckpt))


def test_names_for_type_checkers_are_the_lazy_ones() -> None:
    [block] = [
        node.body
        for node in ast.parse((_PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    declared = {alias.name: node.module for node in block if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted([*declared, "__version__"]) == sorted(ray_jax_ckpt.__all__)
    assert declared == {**ray_jax_ckpt._HOME, "errors": "ray_jax_ckpt"}


def test_unknown_name_is_an_attribute_error_naming_it() -> None:
    with pytest.raises(AttributeError, match="module 'ray_jax_ckpt' has no attribute 'snapshoot'"):
        ray_jax_ckpt.snapshoot  # noqa: B018


def test_every_public_object_has_a_docstring() -> None:
    undocumented = [name for name in ray_jax_ckpt.__all__ if not getattr(ray_jax_ckpt, name).__doc__]
    assert not undocumented


def test_wheel_ships_every_module_and_the_type_marker(tmp_path: Path) -> None:
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(tmp_path), str(_ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"ray_jax_ckpt-{ray_jax_ckpt.__version__}-py3-none-any.whl"
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(_ROOT)) for path in _PACKAGE.rglob("*.py")}
    expected = modules | {"ray_jax_ckpt/py.typed", "ray_jax_ckpt/storage/FORMAT.md"}
    assert shipped == expected


def test_lock_holds_what_the_metadata_asks_for() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    lock = re.findall(r"^([a-z0-9.-]+)==(\S+)", (_ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    locked = {name: packaging.version.Version(version) for name, version in lock}
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for requirement in map(packaging.requirements.Requirement, wanted):
        assert locked[packaging.utils.canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)


def test_lock_names_no_host() -> None:
    assert "://" not in (_ROOT / "requirements.lock").read_text()


def test_installed_version_is_the_one_in_the_source() -> None:
    try:
        installed = importlib.metadata.version("ray_jax_ckpt")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from a source tree that is not installed")
    assert installed == ray_jax_ckpt.__version__
