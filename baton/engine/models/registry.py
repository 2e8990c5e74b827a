"""Every model that Baton can run. Adding one is one file and one line here."""

from __future__ import annotations

from baton.engine.models.architecture import Architecture
from baton.engine.models.hf_config import HfConfig
from baton.engine.models.llama import LLAMA
from baton.engine.models.mistral import MISTRAL
from baton.engine.models.mixtral import MIXTRAL
from baton.engine.models.qwen2 import QWEN2
from baton.engine.models.qwen3 import QWEN3
from baton.engine.models.qwen3_moe import QWEN3_MOE
from baton.engine.spec import DecoderSpec

ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)


def architecture_of(config: HfConfig) -> Architecture:
    """The architecture that ``model_type`` names. Raises ModelError naming the value and the supported ones."""
    model_type = config.values.get("model_type")
    for architecture in ARCHITECTURES:
        if architecture.model_type == model_type:
            return architecture
    supported = ", ".join(architecture.model_type for architecture in ARCHITECTURES)
    problem = "missing" if model_type is None else f"unsupported value {model_type!r}"
    raise config.error("model_type", f"{problem}, supported: {supported}")


def by_name(model_type: str) -> Architecture:
    """The architecture of a spec that this registry produced (``DecoderSpec.architecture``)."""
    return architecture_of(HfConfig({"model_type": model_type}, "spec"))


def read_spec(config: HfConfig) -> DecoderSpec:
    """Turn a Hugging Face config into a spec. Raises ModelError naming file, field and value."""
    return architecture_of(config).read_spec(config)
