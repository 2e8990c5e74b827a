"""Typed reading of a Hugging Face ``config.json``: every miss names the file, the field and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from baton.core.errors import ModelError
from baton.engine.spec import Llama3RopeScaling, RopeSpec


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The values of ``config.json`` and, where present, ``generation_config.json``; ``origin`` is named in errors.

    A null counts as absent, as it does in transformers.
    """

    values: Mapping[str, object]
    origin: str
    generation: Mapping[str, object] = field(default_factory=dict[str, object])

    @classmethod
    def read(cls, config_path: Path) -> HfConfig:
        """Read ``config_path`` and the ``generation_config.json`` beside it. Raises ModelError."""
        generation_path = config_path.with_name("generation_config.json")
        generation = read_json_object(generation_path) if generation_path.is_file() else {}
        return cls(read_json_object(config_path), str(config_path), generation)

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.origin}: {name}: {problem}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """A count of at least 1, under the first of ``names`` that is present."""
        return int(self.number(*names, default=default, whole=True))

    def optional_size(self, name: str) -> int | None:
        return self.size(name) if self.has(name) else None

    def number(self, *names: str, default: float | None = None, whole: bool = False) -> float:
        """A positive number, under the first of ``names`` that is present."""
        for name in names:
            if self.has(name):
                return self._positive(name, self.values[name], whole)
        if default is None:
            raise self.error(" or ".join(names), "missing")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def section(self, name: str) -> HfConfig | None:
        """The object under ``name`` as a config of its own, or None."""
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return HfConfig(cast("dict[str, object]", value), f"{self.origin}: {name}")

    def require(self, name: str, supported: tuple[object, ...], default: object = None) -> None:
        """Refuse a value that would change the computation in a way Baton does not implement."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value not in supported:
            wanted = " or ".join(json.dumps(choice) for choice in supported)
            raise self.error(name, f"unsupported value {json.dumps(value)}, supported: {wanted}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids under ``name``: generation_config.json wins over config.json; an int or a list."""
        value = self.generation.get(name)
        if value is None:
            value = self.values.get(name)
        if value is None:
            return ()
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        return tuple(self._token_id(name, token_id, vocab_size) for token_id in ids)

    def _token_id(self, name: str, value: object, vocab_size: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(name, f"must be a token id in [0, {vocab_size}), got {value!r}")
        return value

    def _positive(self, name: str, value: object, whole: bool) -> float:
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise self.error(name, f"must be a positive {'whole number' if whole else 'number'}, got {value!r}")
        return value


def read_json_object(path: Path) -> dict[str, object]:
    """Parse a JSON file that must hold one object. Raises ModelError naming the file."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: file missing") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return cast("dict[str, object]", value)


def read_rope(config: HfConfig, default_theta: float = 10_000.0) -> RopeSpec:
    """RoPE from either form: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters`` holding both."""
    config.require("partial_rotary_factor", (1, 1.0), default=1.0)
    theta = config.number("rope_theta", default=default_theta)
    parameters = config.section("rope_parameters") or config.section("rope_scaling")
    if parameters is None:
        return RopeSpec(theta)
    parameters.require("partial_rotary_factor", (1, 1.0), default=1.0)
    theta = parameters.number("rope_theta", default=theta)
    kind = parameters.values.get("rope_type", parameters.values.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "llama3":
        return RopeSpec(theta, _llama3_scaling(parameters))
    raise parameters.error("rope_type", f"unsupported value {kind!r}, supported: 'default' or 'llama3'")


def _llama3_scaling(parameters: HfConfig) -> Llama3RopeScaling:
    scaling = Llama3RopeScaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_context=parameters.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        limit = f"must be above low_freq_factor {scaling.low_freq_factor}"
        raise parameters.error("high_freq_factor", f"{limit}, got {scaling.high_freq_factor}")
    return scaling
