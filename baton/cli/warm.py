"""The last step of starting: requests through the whole path, until every part of it knows every other."""

from __future__ import annotations

import asyncio

from baton.client import Client
from baton.core.errors import Overloaded, PeerUnavailable, UnknownModel
from baton.core.types import GenerateRequest, Placement, PrefillMode
from baton.rpc.channels import ClientTls

WARM_SECONDS = 60.0
PAUSE_SECONDS = 0.05
OUTPUT_TOKENS = 2
PATIENCE = 40  # tries until a request that should be prefilled elsewhere is; then the path counts as warm as it is


async def warm_path(address: str, key: str, model: str, *, remote_tokens: int, tls: ClientTls | None = None) -> None:
    """Ask for two tokens until the answer comes, and, with ``remote_tokens``, until a prompt of that length goes to a
    prefill worker (unless none of that length fits the model). PeerUnavailable when no answer comes within a minute.
    """
    async with Client(address, key, tls) as client:
        try:
            async with asyncio.timeout(WARM_SECONDS):
                await _warm(client, model, remote_tokens)
        except TimeoutError as error:
            raise PeerUnavailable(f"the first request got no answer within {WARM_SECONDS:.0f} s") from error


async def _warm(client: Client, model: str, remote_tokens: int) -> None:
    await _until_answered(client, model, tokens=4)
    fits = remote_tokens + PATIENCE + OUTPUT_TOKENS <= (await client.model(model)).context_length
    for attempt in range(PATIENCE if remote_tokens and fits else 0):
        placement = await _until_answered(client, model, tokens=remote_tokens + attempt)
        if placement.prefill_mode is PrefillMode.REMOTE:
            return
        await asyncio.sleep(PAUSE_SECONDS)


async def _until_answered(client: Client, model: str, tokens: int) -> Placement:
    """Where it was answered. While parts still find each other they refuse; that is no failure here."""
    while True:
        try:
            return await _ask(client, model, tokens)
        except (Overloaded, PeerUnavailable, UnknownModel):
            await asyncio.sleep(PAUSE_SECONDS)


async def _ask(client: Client, model: str, tokens: int) -> Placement:
    placement = Placement()
    prompt = tuple(1 + (index * 7 + tokens) % 200 for index in range(tokens))
    request = GenerateRequest(model=model, prompt_token_ids=prompt, max_tokens=OUTPUT_TOKENS, timeout=WARM_SECONDS)
    async for chunk in client.stream(request):
        placement = chunk.placement or placement
    return placement
