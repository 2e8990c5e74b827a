"""Organisations, tenants and keys as administrators change them: listed, several at once, and audited."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from typing import Any, cast

from redis.asyncio import Redis

from baton.core.clock import Clock
from baton.core.errors import AlreadyExists, BatonError, Conflict, InvalidRequest, NotFound
from baton.core.tenancy import check_record
from baton.core.types import (
    AuditEntry,
    Commit,
    Committed,
    KeyRecord,
    Organisation,
    RecordKind,
    ResourceName,
    TenancyRecord,
    Tenant,
)
from baton.state.config import StateConfig
from baton.state.redis_client import within_budget
from baton.state.tenancy import MemoryTenancy, RedisTenancy, new_etag
from baton.state.tenancy_records import decode, encode

REMEMBER_SECONDS = 86_400  # a request id, and the answer to its call
_CHILDREN = {RecordKind.ORGANISATION: RecordKind.TENANT, RecordKind.TENANT: RecordKind.KEY}
_MILLISECONDS = 1000


class RedisRecords(RedisTenancy):
    """Implements ``RecordsApi``. Beside the records: a sorted set of ids for each parent, the answers to recent request
    ids, and the stream ``<namespace>:{tenancy}:audit``, which nothing ever shortens.
    """

    def __init__(self, client: Redis, config: StateConfig) -> None:
        super().__init__(client, config)
        self._commit = resources.files("baton.state").joinpath("admin_commit.lua").read_text(encoding="utf-8")

    async def names(self, parent: ResourceName, after: str, limit: int) -> Sequence[ResourceName]:
        start = f"({after}" if after else "-"
        call = self._client.zrangebylex(self._index(parent), start, "+", 0, limit)  # pyright: ignore
        found = cast("list[bytes]", await within_budget(call, self._config, f"list {str(parent) or 'organizations'}"))
        return [parent.child(name.decode()) for name in found]

    async def commit(self, commit: Commit) -> Committed:
        etags = _checked(commit)
        order = json.dumps(self._order(commit, etags))
        call = self._client.eval(self._commit, 1, self._audit, order)  # pyright: ignore
        answer = cast("list[bytes]", await within_budget(call, self._config, commit.action))  # pyright: ignore
        status, details = answer[0].decode(), [part.decode() for part in answer[1:]]
        if status == "repeated":
            return _committed(details[0])
        if status != "done":
            raise _refusal(commit, status, int(details[0]) - 1, details[1] if len(details) > 1 else "")
        return Committed(commit.changes[0].after, etags[0])

    async def committed(self, actor: str, request: str) -> Committed | None:
        call = self._client.get(self._request(actor, request))
        found = cast("bytes | None", await within_budget(call, self._config, "look for an earlier call"))
        return None if found is None else _committed(found.decode())

    async def audit(self, before: str, limit: int) -> Sequence[AuditEntry]:
        call = self._client.xrevrange(self._audit, f"({before}" if before else "+", "-", limit)  # pyright: ignore
        found = cast(
            "list[tuple[bytes, dict[bytes, bytes]]]", await within_budget(call, self._config, "read the audit")
        )
        return [_entry(entry_id.decode(), fields) for entry_id, fields in found]

    def _index(self, parent: ResourceName) -> str:
        return self._key("names", str(parent))

    def _request(self, actor: str, request: str) -> str:
        return self._key("request", f"{actor}:{request}")

    def _record(self, name: ResourceName) -> str:
        return self._key(name.kind.value, name.id)

    def _order(self, commit: Commit, etags: Sequence[str]) -> dict[str, Any]:
        changes = [
            {
                "record": self._record(change.name),
                "resource": str(change.name),
                "expected": change.expected,
                "etag": etag,
                "data": "" if change.after is None else encode(change.after).decode(),
                "index": self._index(change.name.parent),
                "id": change.name.id,
                "before": _told(change.before),
                "after": _told(change.after),
            }
            for change, etag in zip(commit.changes, etags, strict=True)
        ]
        leaving = [(self._index(name), _leaving(commit, name)) for name in commit.emptied]
        return {
            "actor": commit.actor,
            "action": commit.action,
            "request": self._request(commit.actor, commit.request) if commit.request else "",
            "request_id": commit.request,
            "answer": _answer(commit, etags),
            "remember": REMEMBER_SECONDS,
            "parents": [self._record(name) for name in commit.parents],
            "changes": changes,
            "emptied": [{"index": index, "leaving": count} for index, count in leaving],
        }


class MemoryRecords(MemoryTenancy):
    """The twin of ``RedisRecords`` for one process; it remembers request ids for ever."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._names: dict[ResourceName, list[str]] = {}
        self._answers: dict[tuple[str, str], str] = {}
        self._log: list[AuditEntry] = []

    async def names(self, parent: ResourceName, after: str, limit: int) -> Sequence[ResourceName]:
        held = self._names.get(parent, [])
        start = bisect_right(held, after) if after else 0
        return [parent.child(name) for name in held[start : start + limit]]

    async def commit(self, commit: Commit) -> Committed:
        etags = _checked(commit)
        if (answer := self._answers.get((commit.actor, commit.request))) is not None:
            return _committed(answer)
        self._check(commit)
        for change, etag in zip(commit.changes, etags, strict=True):
            self._apply(change.name, change.after, etag)
            self._note(commit, str(change.name), _told(change.before), _told(change.after))
        if commit.request:
            self._answers[commit.actor, commit.request] = _answer(commit, etags)
        return Committed(commit.changes[0].after, etags[0])

    async def committed(self, actor: str, request: str) -> Committed | None:
        found = self._answers.get((actor, request))
        return None if found is None else _committed(found)

    async def audit(self, before: str, limit: int) -> Sequence[AuditEntry]:
        older = [entry for entry in reversed(self._log) if not before or entry.id < before]
        return older[:limit]

    def _check(self, commit: Commit) -> None:
        for place, parent in enumerate(commit.parents):
            if (parent.kind.value, parent.id) not in self._records:
                raise _refusal(commit, "missing", place, "")
        for place, change in enumerate(commit.changes):
            _, found = self._records.get((change.name.kind.value, change.name.id), (b"", ""))
            if found != change.expected:
                raise _refusal(commit, "conflict", place, found)
        for place, name in enumerate(commit.emptied):
            if len(self._names.get(name, [])) != _leaving(commit, name):
                raise _refusal(commit, "occupied", place, "")

    def _apply(self, name: ResourceName, after: TenancyRecord | None, etag: str) -> None:
        self._changes += 1
        held = self._names.setdefault(name.parent, [])
        if name.id in held:
            held.remove(name.id)
        if after is None:
            del self._records[name.kind.value, name.id]
            return
        held.append(name.id)
        held.sort()
        self._records[name.kind.value, name.id] = encode(after), etag

    def _note(self, commit: Commit, resource: str, before: str, after: str) -> None:
        entry_id = f"{len(self._log):013d}-0"
        entry = AuditEntry(
            entry_id, self._clock.wall(), commit.actor, commit.action, resource, before, after, commit.request
        )
        self._log.append(entry)


def _checked(commit: Commit) -> list[str]:
    """New etags for the changes, none of which stores what makes no sense."""
    for change in commit.changes:
        if change.after is not None:
            check_record(change.after)
    return [new_etag() for _ in commit.changes]


def _leaving(commit: Commit, parent: ResourceName) -> int:
    return sum(change.after is None and change.name.parent == parent for change in commit.changes)


def _refusal(commit: Commit, status: str, place: int, found: str) -> BatonError:
    if status == "missing":
        return NotFound(f"{commit.parents[place]}: does not exist")
    if status == "occupied":
        name = commit.emptied[place]
        return InvalidRequest(f"force: {name} is not empty: its {_CHILDREN[name.kind]}s must go first", field="force")
    change = commit.changes[place]
    if not found:
        return Conflict(f"etag: {change.name} does not exist any more, got {change.expected!r}")
    if not change.expected:
        return AlreadyExists(f"{change.name}: a {change.name.kind} of the id {change.name.id!r} exists already")
    return Conflict(f"etag: {change.name} has changed: must be {found!r}, got {change.expected!r}")


def _told(record: TenancyRecord | None) -> str:
    """For the audit log: what somebody could log in with is left out."""
    if record is None:
        return ""
    fields = cast("dict[str, Any]", json.loads(encode(record)))
    fields.pop("secret_hmac", None)
    return json.dumps(fields, separators=(",", ":"), sort_keys=True)


def _answer(commit: Commit, etags: Sequence[str]) -> str:
    first = commit.changes[0]
    data = None if first.after is None else encode(first.after).decode()
    return json.dumps({"digest": commit.digest, "kind": first.name.kind, "data": data, "etag": etags[0]})


def _committed(answer: str) -> Committed:
    fields = cast("dict[str, str | None]", json.loads(answer))
    data = fields["data"]
    record = None if data is None else _read(RecordKind(fields["kind"] or ""), data.encode())
    return Committed(record, fields["etag"] or "", fields["digest"] or "", repeated=True)


def _read(kind: RecordKind, data: bytes) -> TenancyRecord:
    match kind:
        case RecordKind.ORGANISATION:
            return decode(Organisation, data)
        case RecordKind.TENANT:
            return decode(Tenant, data)
        case RecordKind.KEY:
            return decode(KeyRecord, data)


def _entry(entry_id: str, fields: dict[bytes, bytes]) -> AuditEntry:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    return AuditEntry(
        id=entry_id,
        at=int(entry_id.partition("-")[0]) / _MILLISECONDS,
        actor=text["actor"],
        action=text["action"],
        resource=text["resource"],
        before=text["before"],
        after=text["after"],
        request_id=text["request"],
    )
