"""The module ``attention_window``: each sequence of a step sees as far back as its own window, and no further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from baton.core.errors import InvalidRequest
from baton.core.types import Sampling, StopRules, TokenRequest
from baton.engine.config import EngineConfig
from baton.engine.decoder import UNLIMITED, Decoder, PackedStep, Weights
from baton.engine.load import build_runner
from baton.engine.native.decoder import NativeDecoder
from baton.engine.spec import DecoderSpec
from baton.engine.torch_decoder import TorchDecoder
from baton.engine.weights.load import load_weights
from baton.engine.weights.source import load_spec
from tests.goldens import DATA
from tests.real_engines import prompt, real_config, real_driver, together
from tests.unit.engine.core_driver import CoreDriver, Driver

BLOCK = 16
DECODERS: dict[str, Callable[[DecoderSpec, Weights, torch.dtype], Decoder]] = {
    "torch": TorchDecoder,
    "native": NativeDecoder,
}


def decoder(kind: str, name: str, window: int | None) -> Decoder:
    """Of a model whose own sliding window is ``window``."""
    spec = load_spec(DATA / "tiny" / name)
    weights = load_weights(DATA / "tiny" / name, spec, torch.float32)
    return DECODERS[kind](replace(spec, sliding_window=window), weights, torch.float32)


def logits(of: Decoder, texts: Sequence[Sequence[int]], windows: Sequence[int] | None) -> torch.Tensor:
    """Of every token of the texts: all but their last 5 tokens in one step, the rest in another."""
    per_text = max(-(-len(text) // BLOCK) for text in texts)
    tables = torch.arange(len(texts) * per_text, dtype=torch.int32).view(len(texts), per_text)
    shape = (len(texts) * per_text, of.spec.layers, 2, of.spec.kv_heads, BLOCK, of.spec.head_dim)
    pool = torch.full(shape, torch.nan)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for spans in ([(0, len(text) - 5) for text in texts], [(len(text) - 5, len(text)) for text in texts]):
        counts = [end - start for start, end in spans]
        step = PackedStep(
            torch.tensor([t for text, span in zip(texts, spans, strict=True) for t in text[slice(*span)]]).int(),
            torch.tensor([position for span in spans for position in range(*span)]).int(),
            torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int(),
            tables,
            torch.arange(sum(counts)).int(),
            None if windows is None else torch.tensor(windows).int(),
        )
        for mine, found in zip(rows, of.forward(step, pool).split(counts), strict=True):
            mine.append(found)
    return torch.cat([part for mine in rows for part in mine])


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("window", [1, 7, 64, 65, 120])
def test_a_requests_window_is_that_of_a_model_with_such_a_window(kind: str, window: int) -> None:
    texts = [prompt(130, 1), prompt(20, 2)]
    found = logits(decoder(kind, "mistral-window", None), texts, [window, window])
    assert torch.equal(found, logits(decoder(kind, "mistral-window", window), texts, None))


@pytest.mark.parametrize("kind", DECODERS)
def test_sequences_with_windows_and_without_share_a_step_and_do_not_touch_each_other(kind: str) -> None:
    texts, windows = [prompt(130, 1), prompt(90, 2), prompt(70, 3)], [9, UNLIMITED, 40]
    of = decoder(kind, "llama-gqa-tied", None)
    apart = [logits(of, [text], [window]) for text, window in zip(texts, windows, strict=True)]
    assert torch.equal(logits(of, texts, windows), torch.cat(apart))
    assert torch.equal(apart[1], logits(of, texts[1:2], None))
    assert not torch.equal(apart[0], logits(of, texts[:1], None))


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(("own", "asked"), [(9, 40), (40, 9)])
def test_the_narrower_one_of_model_and_request_counts(kind: str, own: int, asked: int) -> None:
    texts = [prompt(100, 1)]
    found = logits(decoder(kind, "llama-gqa-tied", own), texts, [asked])
    assert torch.equal(found, logits(decoder(kind, "llama-gqa-tied", 9), texts, None))


def test_the_native_decoder_refuses_a_window_that_shows_nothing() -> None:
    of = decoder("native", "llama-gqa-tied", None)
    with pytest.raises(InvalidRequest, match=r"windows\[1\] must be at least 1, got 0"):
        logits(of, [prompt(20), prompt(20, 1)], [5, 0])


# --- the engine -------------------------------------------------------------------------------------------------------


def asked(window: int | None, salt: int = 1, max_tokens: int = 30) -> TokenRequest:
    return TokenRequest(
        f"w{window}-{salt}",
        prompt(100, salt),
        sampling=Sampling(temperature=0.8, seed=5),
        stop=StopRules(max_tokens, ignore_eos=True),
        attention_window=window,
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_requests_with_windows_answer_in_a_crowd_as_they_do_alone(backend: str) -> None:
    """Though they share a prompt: keys and values of one window are no hit for another. With preemptions."""
    config = real_config("llama-gqa-tied", backend=backend, kv_blocks=22, growth_window=0)
    wanted = [asked(window, salt) for salt in (1, 2) for window in (None, 16, 50)]
    alone = [together(CoreDriver(build_runner(config), config).answer(each).chunks).token_ids for each in wanted]
    driver = real_driver(config)
    keys = [driver.reserve(each) for each in wanted]
    for key in keys:
        driver.decode_when_admitted(key)
    driver.finish(*keys)
    assert [tuple(driver.outcomes[key].tokens) for key in keys] == alone
    assert driver.stats.preemptions > 0
    assert alone[0] != alone[1] != alone[2]
    driver.assert_idle()


def test_the_prefix_cache_serves_the_same_window_only() -> None:
    driver = real_driver(real_config("llama-gqa-tied"))
    assert [driver.answer(asked(window)).cached_tokens for window in (16, 16, 50, None, None)] == [0, 96, 0, 0, 96]


def refusal(driver: CoreDriver, wanted: TokenRequest) -> str:
    key = driver.reserve(wanted)
    driver.step()
    error = driver.outcomes[key].error
    assert isinstance(error, InvalidRequest) and error.field == "attention_window"
    return error.message


@pytest.mark.parametrize("window", [0, -1, 1025])
def test_an_absurd_window_is_refused(window: int) -> None:
    error = refusal(real_driver(real_config("llama-gqa-tied")), asked(window))
    assert error == f"attention_window: must be between 1 and 1024, got {window}"


def test_a_worker_without_the_module_says_so() -> None:
    assert refusal(Driver(), asked(16)) == ("attention_window: this worker has no module attention_window; it has none")


def test_which_workers_have_the_module() -> None:
    config = EngineConfig(str(DATA / "tiny" / "llama-gqa-tied"), kv_blocks=8)
    for backend in ("native", "torch"):
        assert build_runner(replace(config, backend=backend)).card.modules == ("attention_window",)
