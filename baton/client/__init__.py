"""What other services import to talk to the gateway.

async with Client("127.0.0.1:8600", key) as client:
    async for chunk in client.generate(text="The baton is", max_tokens=32):
        print(chunk.text, end="")
    answer = await client.complete_chat([ChatMessage("user", "What is a relay race?")])
    print(answer.text, answer.choices[0].usage)
"""

from baton.client.answer import Answer, Choice
from baton.client.client import Client
from baton.client.options import Options
from baton.client.resume import ResumePolicy
from baton.client.sync import SyncClient
from baton.core.types import ChatMessage, GenerateChunk, GenerateRequest
from baton.rpc.channels import ClientTls

__all__ = [
    "Answer",
    "ChatMessage",
    "Choice",
    "Client",
    "ClientTls",
    "GenerateChunk",
    "GenerateRequest",
    "Options",
    "ResumePolicy",
    "SyncClient",
]
