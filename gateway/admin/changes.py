"""Changing organisations, tenants and keys: each change checked, made and audited in one step, once a request id."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from baton.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound
from baton.core.tenancy import check_name, check_record
from baton.core.types import (
    ANY_ETAG,
    MAX_REQUEST_ID,
    Account,
    Commit,
    Committed,
    IssuedKey,
    KeyRecord,
    Organisation,
    RecordChange,
    RecordKind,
    ResourceName,
    TenancyRecord,
    Tenant,
    Versioned,
    WriteOptions,
)
from baton.state.tenancy_records import encode
from gateway.admin.merging import merged, paths_of
from gateway.admin.parts import AdminParts, find
from gateway.admin.record_warnings import warnings_of
from gateway.admin.rights import actor, check_fields, check_granted, check_platform, check_writes

ATTEMPTS = 5  # for a writer that takes whichever etag there is
MAX_DELETED = 1000  # records in one step
NAMES_AT_ONCE = 500
UID_BYTES = 8
KINDS: dict[RecordKind, type[TenancyRecord]] = {
    RecordKind.ORGANISATION: Organisation,
    RecordKind.TENANT: Tenant,
    RecordKind.KEY: KeyRecord,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call that writes: who makes it, what it is called in the audit log, and what tells it from other calls."""

    caller: Account
    action: str
    name: ResourceName
    options: WriteOptions
    digest: str

    @classmethod
    def of(cls, caller: Account, action: str, name: ResourceName, options: WriteOptions, *what: object) -> Call:
        """InvalidRequest when the request id is none."""
        request_id = options.request_id
        if len(request_id) > MAX_REQUEST_ID or not (request_id.isascii() and request_id.isprintable()):
            rule = f"must be at most {MAX_REQUEST_ID} printable ASCII characters"
            raise InvalidRequest.out_of_range("request_id", repr(request_id[:MAX_REQUEST_ID]), rule)
        said = repr((action, str(name), options.etag, *map(_steady, what)))
        return cls(caller, action, name, options, hashlib.sha256(said.encode()).hexdigest())

    def commit(
        self, *changes: RecordChange, parents: Sequence[ResourceName] = (), emptied: Sequence[ResourceName] = ()
    ) -> Commit:
        who, request = actor(self.caller), self.options.request_id
        return Commit(who, self.action, changes, tuple(parents), tuple(emptied), request, self.digest)


class AdminChanges:
    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    async def create(
        self, name: ResourceName, record: TenancyRecord, options: WriteOptions, caller: Account
    ) -> Versioned:
        check_platform(caller, f"creating a {name.kind}")
        _check_kind(name, record, RecordKind.ORGANISATION, RecordKind.TENANT)
        record = _named(record, name)
        call = Call.of(caller, f"create {name.kind}", name, options, record)
        done = await self._repeated(call)
        if done is None:
            self._check(record, None)
            if isinstance(record, Tenant):
                record = replace(record, uid="" if options.validate_only else secrets.token_hex(UID_BYTES))
            change = RecordChange(name, "", None, record)
            done = await self._done(call, call.commit(change, parents=_parents(name)))
        return self._answer(name, done)

    async def update(
        self, name: ResourceName, record: TenancyRecord, mask: Sequence[str], options: WriteOptions, caller: Account
    ) -> Versioned:
        check_writes(caller, name, f"changing a {name.kind}")
        _check_kind(name, record, *RecordKind)
        paths = paths_of(mask, KINDS[name.kind])
        check_fields(caller, name, paths)
        call = Call.of(caller, f"update {name.kind}", name, options, record, *paths)

        async def made(current: Versioned) -> Commit:
            self._check_holder(caller, current.record)
            after = merged(current.record, record, paths)
            self._check_holder(caller, after)
            self._check(after, current.record)
            return call.commit(RecordChange(name, current.etag, current.record, after))

        return self._answer(name, await self._changed(call, made))

    async def delete(self, name: ResourceName, options: WriteOptions, force: bool, caller: Account) -> None:
        if name.kind is RecordKind.KEY:
            check_writes(caller, name, "deleting a key")
        else:
            check_platform(caller, f"deleting a {name.kind}")
        call = Call.of(caller, f"delete {name.kind}", name, options, force)

        async def made(current: Versioned) -> Commit:
            self._check_holder(caller, current.record)
            below = await self._below(name) if force else []
            gone = [current, *below]
            changes = [RecordChange(each.name, each.etag, each.record, None) for each in gone]
            return call.commit(*changes, emptied=[each.name for each in gone if each.name.kind is not RecordKind.KEY])

        await self._changed(call, made)

    # --- keys -------------------------------------------------------------------------------------------------------

    async def issue_key(
        self, name: ResourceName, record: KeyRecord, options: WriteOptions, caller: Account
    ) -> IssuedKey:
        """``name`` without a key: an id is made up."""
        asked, name = name.key, name if name.key else _with_id(name)
        check_writes(caller, name, "issuing a key")
        call = Call.of(caller, "create key", name.parent, options, record, asked)
        if (done := await self._repeated(call)) is not None:
            return _told_before(name.parent, done)
        fresh = replace(record, id=name.key, tenant=name.tenant, created_at=self._now(), revoked_at=None)
        check_granted(caller, fresh)
        shown, issued = self._parts.secret.issue(fresh)
        self._check(issued, None)
        await find(self._parts.records, name.parent)  # the tenant may belong to another organisation
        done = await self._done(call, call.commit(RecordChange(name, "", None, issued), parents=_parents(name)))
        if done.repeated:
            return _told_before(name.parent, done)
        return _issued(name, done, shown, validate_only=options.validate_only)

    async def rotate_key(
        self, name: ResourceName, successor: str, overlap: float, options: WriteOptions, caller: Account
    ) -> IssuedKey:
        check_writes(caller, name, "rotating a key")
        call = Call.of(caller, "rotate key", name, options, overlap, successor)
        successor = successor or _with_id(name.parent).key
        shown = ""

        async def made(current: Versioned) -> Commit:
            nonlocal shown
            old = _key(current)
            check_granted(caller, old)
            shown, issued, ending = self._parts.secret.rotate(old, successor, overlap=overlap, now=self._now())
            fresh = RecordChange(name.parent.child(successor), "", None, issued)
            return call.commit(fresh, RecordChange(name, current.etag, old, ending), parents=_parents(name))

        done = await self._changed(call, made)
        if done.repeated:
            return _told_before(name.parent, done)
        return _issued(name.parent.child(successor), done, shown, validate_only=options.validate_only)

    async def revoke_key(self, name: ResourceName, options: WriteOptions, caller: Account) -> Versioned:
        check_writes(caller, name, "revoking a key")
        call = Call.of(caller, "revoke key", name, options)

        async def made(current: Versioned) -> Commit:
            key = _key(current)
            check_granted(caller, key)
            revoked = key if key.revoked_at is not None else replace(key, revoked_at=self._now())
            return call.commit(RecordChange(name, current.etag, key, revoked))

        return self._answer(name, await self._changed(call, made))

    # --- one change -------------------------------------------------------------------------------------------------

    async def _changed(self, call: Call, made: Callable[[Versioned], Awaitable[Commit]]) -> Committed:
        """Read the record, make a commit of it, do it; again when another write came between and no etag forbids."""
        if not call.options.etag:
            raise InvalidRequest(f"etag: must be that of {call.name}, or '*' for whichever, got ''", field="etag")
        if (done := await self._repeated(call)) is not None:
            return done
        for attempt in range(ATTEMPTS):
            current = await find(self._parts.records, call.name)
            if call.options.etag not in {ANY_ETAG, current.etag}:
                rule = f"must be {current.etag!r}, got {call.options.etag!r}"
                raise Conflict(f"etag: {call.name} has changed: {rule}")
            try:
                return await self._done(call, await made(current))
            except Conflict:
                if call.options.etag != ANY_ETAG or attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _done(self, call: Call, commit: Commit) -> Committed:
        if call.options.validate_only:
            await self._check_possible(commit)
            return Committed(commit.changes[0].after, "")
        return self._same_call(call, await self._parts.records.commit(commit))

    async def _check_possible(self, commit: Commit) -> None:
        """What the store would find, found without it. Etags were compared when the records were read."""
        for parent in commit.parents:
            await find(self._parts.records, parent)
        for change in commit.changes:
            if not change.expected and await self._exists(change.name):
                raise AlreadyExists(f"{change.name}: a {change.name.kind} of the id {change.name.id!r} exists already")
            if change.after is not None:
                check_record(change.after)
        leaving = {change.name for change in commit.changes if change.after is None}
        for name in commit.emptied:
            if left := [
                child for child in await self._parts.records.names(name, "", MAX_DELETED) if child not in leaving
            ]:
                raise InvalidRequest(f"force: {name} is not empty: {left[0]} must go first", field="force")

    async def _exists(self, name: ResourceName) -> bool:
        records = self._parts.records
        reads = {RecordKind.ORGANISATION: records.organisation, RecordKind.TENANT: records.tenant}
        return await reads.get(name.kind, records.key)(name.id) is not None

    async def _repeated(self, call: Call) -> Committed | None:
        if not call.options.request_id or call.options.validate_only:
            return None
        found = await self._parts.records.committed(actor(call.caller), call.options.request_id)
        return None if found is None else self._same_call(call, found)

    def _same_call(self, call: Call, done: Committed) -> Committed:
        if done.repeated and done.digest != call.digest:
            used = f"was used for another call, got {call.options.request_id!r}"
            raise InvalidRequest(f"request_id: {used}", field="request_id")
        return done

    async def _below(self, name: ResourceName) -> list[Versioned]:
        found: list[Versioned] = []
        if name.kind is RecordKind.KEY:
            return found
        after = ""
        while names := await self._parts.records.names(name, after, NAMES_AT_ONCE):
            after = names[-1].id
            for child in names:
                found += [await self._still_there(child), *await self._below(child)]
            if len(found) >= MAX_DELETED:
                rule = f"at most {MAX_DELETED} records go at once; delete those below {name} first"
                raise InvalidRequest(f"force: {rule}", field="force")
        return found

    async def _still_there(self, name: ResourceName) -> Versioned:
        try:
            return await find(self._parts.records, name)
        except NotFound as error:
            raise Conflict(f"{name} went while {name.parent} was read") from error

    def _check_holder(self, caller: Account, record: TenancyRecord) -> None:
        if isinstance(record, KeyRecord):
            check_granted(caller, record)

    def _check(self, record: TenancyRecord, before: TenancyRecord | None) -> None:
        """Raises InvalidRequest for what makes no sense, and for models new to the record that nobody serves."""
        check_record(record)
        fleet = self._parts.fleet()
        new = _models(record) - (_models(before) if before is not None else frozenset())
        unknown = sorted(new.difference(fleet.models)) if fleet is not None else []
        if fleet is not None and unknown:
            rule = f"must be one of {', '.join(fleet.models) or 'none served yet'}"
            raise InvalidRequest.out_of_range("models", repr(unknown[0]), rule)

    def _answer(self, name: ResourceName, done: Committed) -> Versioned:
        found = _answer(name, done)
        return replace(found, warnings=warnings_of(found.record, self._parts.fleet()))

    def _now(self) -> float:
        return round(self._parts.clock.wall(), 3)


def _steady(what: object) -> object:
    """The same text for the same thing in every process: sets have no order."""
    return encode(what) if isinstance(what, Organisation | Tenant | KeyRecord) else what


def _check_kind(name: ResourceName, record: TenancyRecord, *kinds: RecordKind) -> None:
    if name.kind not in kinds or not isinstance(record, KINDS[name.kind]):
        raise InvalidRequest.out_of_range("name", repr(str(name)), f"must name a {type(record).__name__.lower()}")


def _models(record: TenancyRecord) -> frozenset[str]:
    limited = frozenset(rule.model for rule in record.model_limits)
    return limited if isinstance(record, Organisation) else limited | frozenset(record.models or ())


def _named(record: TenancyRecord, name: ResourceName) -> TenancyRecord:
    if isinstance(record, Tenant):
        check_name("organization", name.organisation)
        return replace(record, name=name.tenant, organisation=name.organisation)
    return replace(record, name=name.organisation) if isinstance(record, Organisation) else record


def _parents(name: ResourceName) -> tuple[ResourceName, ...]:
    return (name.parent,) if name.parent.organisation else ()


def _with_id(tenant: ResourceName) -> ResourceName:
    """A key of this tenant whose id nobody has; ids hold no dot."""
    return tenant.child(f"{tenant.tenant[:40]}-{secrets.token_hex(4)}".replace(".", "-"))


def _key(found: Versioned) -> KeyRecord:
    if not isinstance(found.record, KeyRecord):
        raise InvalidRequest.out_of_range("name", repr(str(found.name)), "must name a key")
    return found.record


def _answer(name: ResourceName, done: Committed) -> Versioned:
    if done.record is None:
        raise NotFound(f"{name}: was deleted by an earlier call with this request id")
    return Versioned(name, done.record, done.etag)


def _issued(name: ResourceName, done: Committed, shown: str, *, validate_only: bool) -> IssuedKey:
    return IssuedKey(_answer(name, done), "" if validate_only else shown)


def _told_before(tenant: ResourceName, done: Committed) -> IssuedKey:
    """The secret was told once; who lost it rotates the key."""
    record = done.record
    key_id = record.id if isinstance(record, KeyRecord) else ""
    return IssuedKey(_answer(tenant.child(key_id), done), "")
