"""Parameters of a model's config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("auto", "reference")
TRUST = ("any", "signed")
RETUNE = ("never", "load")
MAX_DIGITS = 12


class SettingsError(ValueError):
    """A parameter has a value that cannot be meant; the message names it and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """``engine``: ``auto`` serves tuned plans, ``reference`` switches all plans off.

    ``executor_memory_mb`` bounds what all executors of an instance take together, in MiB; ``max_buckets``
    their number. ``plan_overlay`` is a directory of plans that is read before the model's own.
    ``plan_trust``: ``any``, or ``signed``: only plans signed by the owner of ``plan_public_key`` are loaded.
    ``retune``: ``load`` tunes buckets that are tuned for other environments alone into the overlay before
    the model is ready, within ``retune_budget_s`` seconds.
    """

    engine: str = "auto"
    executor_memory_mb: int = 4096
    max_buckets: int = 32
    plan_overlay: Path | None = None
    plan_trust: str = "any"
    plan_public_key: str = ""
    retune: str = "never"
    retune_budget_s: int = 60

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Settings:
        """From parameter names and their string values. Names of other owners are ignored.

        Raises SettingsError.
        """
        engine = parameters.get("ENGINE", cls.engine)
        if engine not in ENGINES:
            raise SettingsError(f"parameter ENGINE is {engine!r}; it must be one of {', '.join(ENGINES)}")
        overlay = parameters.get("PLAN_OVERLAY", "")
        trust = parameters.get("PLAN_TRUST", "") or cls.plan_trust
        key = parameters.get("PLAN_PUBLIC_KEY", "")
        if trust not in TRUST:
            raise SettingsError(f"parameter PLAN_TRUST is {trust!r}; it must be one of {', '.join(TRUST)}")
        if trust == "signed" and not key:
            raise SettingsError("parameter PLAN_TRUST is 'signed'; PLAN_PUBLIC_KEY must say by which key")
        return cls(
            engine,
            _positive(parameters, "EXECUTOR_MEMORY_MB", cls.executor_memory_mb),
            _positive(parameters, "MAX_BUCKETS", cls.max_buckets),
            Path(overlay) if overlay else None,
            trust,
            key,
            _retune(parameters.get("RETUNE", ""), overlay, trust),
            _positive(parameters, "RETUNE_BUDGET_S", cls.retune_budget_s),
        )


def _retune(text: str, overlay: str, trust: str) -> str:
    retune = text or Settings.retune
    if retune not in RETUNE:
        raise SettingsError(f"parameter RETUNE is {retune!r}; it must be one of {', '.join(RETUNE)}")
    if retune != "never" and not overlay:
        raise SettingsError(f"parameter RETUNE is {retune!r}; PLAN_OVERLAY must say where its plans go")
    if retune != "never" and trust == "signed":
        raise SettingsError(
            f"parameter RETUNE is {retune!r}, but PLAN_TRUST is 'signed': nobody signs its plans"
        )
    return retune


def _positive(parameters: Mapping[str, str], name: str, default: int) -> int:
    text = parameters.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) == 0:
        raise SettingsError(f"parameter {name} is {text!r}; it must be a whole number of at least 1")
    return int(text)
