"""Settings from environment variables, `RAY_JAX_CKPT_*`, for runs whose script is not to be changed."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ray_jax_ckpt.config import PersistConfig, ResumeMode, SnapshotConfig
from ray_jax_ckpt.errors import ConfigError

PREFIX = "RAY_JAX_CKPT_"
ENABLED = f"{PREFIX}ENABLED"
_SECTIONS = {"SNAPSHOT": SnapshotConfig, "PERSIST": PersistConfig}
_OTHERS = ("RESUME", "RESUME_FROM")
# Read elsewhere.
_FOREIGN = ("ENABLED", "FAULTS")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        snapshot: `RAY_JAX_CKPT_SNAPSHOT_<FIELD>`.
        persist: `RAY_JAX_CKPT_PERSIST_<FIELD>`; None if there is none of these.
        resume: `RAY_JAX_CKPT_RESUME`.
        resume_from: `RAY_JAX_CKPT_RESUME_FROM`.
    """

    snapshot: SnapshotConfig
    persist: PersistConfig | None
    resume: str
    resume_from: str | None


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this package does anything: `RAY_JAX_CKPT_ENABLED=0` turns it off.

    Raises:
        ConfigError: The variable is neither yes nor no.
    """
    said = (os.environ if environ is None else environ).get(ENABLED, "").strip()
    if said and said.lower() not in _WORDS:
        raise ConfigError(f"{ENABLED}={said!r}: say 1 or 0.")
    return _WORDS.get(said.lower(), True)


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that environment variables give. An empty one counts as not set; "none" is None.

    Args:
        environ: The variables; None: this process's.

    Raises:
        ConfigError: A variable has no such setting, or a value that cannot work. The message names the variable.
    """
    environ = os.environ if environ is None else environ
    given = {name.removeprefix(PREFIX): value for name, value in environ.items() if name.startswith(PREFIX) and value}
    names = {f"{section}_{field.upper()}": (section, field) for section, field in _fields()}
    found: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, text in given.items():
        if name in names:
            section, field = names[name]
            found[section][field] = _checked(_SECTIONS[section], field, name, text)
        elif name not in (*_OTHERS, *_FOREIGN):
            raise ConfigError(_unknown(name, [*names, *_OTHERS, *_FOREIGN]))
    resume = given.get("RESUME", "auto")
    if resume not in get_args(ResumeMode):
        modes = ", ".join(map(repr, get_args(ResumeMode)))
        raise ConfigError(f"Environment variable {PREFIX}RESUME={resume!r}: say one of {modes}.")
    persist = PersistConfig(**found["PERSIST"]) if found["PERSIST"] else None
    return Settings(SnapshotConfig(**found["SNAPSHOT"]), persist, resume, given.get("RESUME_FROM"))


def _fields() -> list[tuple[str, str]]:
    return [(section, field) for section, config in _SECTIONS.items() for field in config.model_fields]


def _checked(config: type[SnapshotConfig] | type[PersistConfig], field: str, name: str, text: str) -> Any:
    """The value of a variable as the setting has it."""
    try:
        value: Any = (
            None if text.strip().lower() == "none" else json.loads(text) if text.lstrip().startswith("{") else text
        )
        return getattr(config(**{field: value}), field)
    except ValueError as error:
        raise ConfigError(f"Environment variable {PREFIX}{name}={text!r}: {error}") from None


def _unknown(name: str, known: list[str]) -> str:
    # Who leaves the section away most often means the snapshots.
    short = [one for one in known if one.partition("_")[0] in _SECTIONS and one.partition("_")[2] == name]
    near = short[:1] or difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(PREFIX + one for one in known)}."
    return f"Environment variable {PREFIX}{name} is no setting; {hint}"
