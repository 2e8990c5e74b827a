"""AdminApi over gRPC: the client. It has no callers: who asks is said by the channel's token, an API key."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.field_mask_pb2 import FieldMask

from baton.core.types import (
    AlertPage,
    AuditPage,
    IssuedKey,
    KeyRecord,
    LedgerEntry,
    Organisation,
    Paging,
    QuotaBalance,
    RecordKind,
    RecordPage,
    RefusalNote,
    ResourceName,
    TenancyRecord,
    Tenant,
    UsageGroup,
    UsageQuery,
    UsageSum,
    Versioned,
    WriteOptions,
)
from baton.rpc.channels import PeerChannel
from baton.rpc.errors import from_rpc_error
from baton.rpc.wire import admin as wire
from baton.rpc.wire.records import (
    enum_name,
    key_to_wire,
    organisation_to_wire,
    tenant_to_wire,
    versioned_key,
    versioned_organisation,
    versioned_tenant,
)
from protos.baton.v1 import admin_pb2 as pb
from protos.baton.v1 import admin_pb2_grpc

T = TypeVar("T")


class AdminClient:
    """``limit``: seconds for one call, but for the export, which lasts as long as it has entries."""

    def __init__(self, channel: PeerChannel, limit: float = 30.0) -> None:
        self._channel = channel
        self._limit = limit
        self._stub = admin_pb2_grpc.AdminServiceStub(channel.channel)

    # --- records ----------------------------------------------------------------------------------------------------

    async def get(self, name: ResourceName) -> Versioned:
        text = str(name)
        match name.kind:
            case RecordKind.ORGANISATION:
                request = pb.GetOrganizationRequest(name=text)
                return versioned_organisation((await self._call(self._stub.GetOrganization, request)).organization)
            case RecordKind.TENANT:
                return versioned_tenant((await self._call(self._stub.GetTenant, pb.GetTenantRequest(name=text))).tenant)
            case RecordKind.KEY:
                return versioned_key((await self._call(self._stub.GetKey, pb.GetKeyRequest(name=text))).key)

    async def list(self, parent: ResourceName, paging: Paging) -> RecordPage:
        page: dict[str, Any] = {"page_size": paging.size, "page_token": paging.token}
        if not parent.organisation:
            found = await self._call(self._stub.ListOrganizations, pb.ListOrganizationsRequest(**page))
            return RecordPage(tuple(map(versioned_organisation, found.organizations)), found.next_page_token)
        if not parent.tenant:
            tenants = await self._call(self._stub.ListTenants, pb.ListTenantsRequest(parent=str(parent), **page))
            return RecordPage(tuple(map(versioned_tenant, tenants.tenants)), tenants.next_page_token)
        keys = await self._call(self._stub.ListKeys, pb.ListKeysRequest(parent=str(parent), **page))
        return RecordPage(tuple(map(versioned_key, keys.keys)), keys.next_page_token)

    async def create(self, name: ResourceName, record: Organisation | Tenant, options: WriteOptions) -> Versioned:
        said = _said(options)
        if isinstance(record, Organisation):
            message = organisation_to_wire(record, ResourceName(), "")
            request = pb.CreateOrganizationRequest(organization_id=name.organisation, organization=message, **said)
            return versioned_organisation((await self._call(self._stub.CreateOrganization, request)).organization)
        tenant, parent = tenant_to_wire(record, ResourceName(), ""), str(name.parent)
        asked = pb.CreateTenantRequest(parent=parent, tenant_id=name.tenant, tenant=tenant, **said)
        return versioned_tenant((await self._call(self._stub.CreateTenant, asked)).tenant)

    async def update(
        self, name: ResourceName, record: TenancyRecord, mask: Sequence[str], options: WriteOptions
    ) -> Versioned:
        said: dict[str, Any] = _said(options) | {"update_mask": FieldMask(paths=mask)}
        match record:
            case Organisation():
                organization = organisation_to_wire(record, name, options.etag)
                request = pb.UpdateOrganizationRequest(organization=organization, **said)
                return versioned_organisation((await self._call(self._stub.UpdateOrganization, request)).organization)
            case Tenant():
                tenant = pb.UpdateTenantRequest(tenant=tenant_to_wire(record, name, options.etag), **said)
                return versioned_tenant((await self._call(self._stub.UpdateTenant, tenant)).tenant)
            case KeyRecord():
                key = pb.UpdateKeyRequest(key=key_to_wire(record, name, options.etag), **said)
                return versioned_key((await self._call(self._stub.UpdateKey, key)).key)

    async def delete(self, name: ResourceName, options: WriteOptions, force: bool) -> None:
        said: dict[str, Any] = _said(options) | {"name": str(name), "etag": options.etag}
        match name.kind:
            case RecordKind.ORGANISATION:
                await self._call(self._stub.DeleteOrganization, pb.DeleteOrganizationRequest(force=force, **said))
            case RecordKind.TENANT:
                await self._call(self._stub.DeleteTenant, pb.DeleteTenantRequest(force=force, **said))
            case RecordKind.KEY:
                await self._call(self._stub.DeleteKey, pb.DeleteKeyRequest(**said))

    # --- keys -------------------------------------------------------------------------------------------------------

    async def issue_key(self, name: ResourceName, record: KeyRecord, options: WriteOptions) -> IssuedKey:
        tenant = ResourceName(name.organisation, name.tenant)
        key = key_to_wire(record, ResourceName(), "")
        request = pb.CreateKeyRequest(parent=str(tenant), key_id=name.key, key=key, **_said(options))
        answer = await self._call(self._stub.CreateKey, request)
        return IssuedKey(versioned_key(answer.key), answer.secret)

    async def rotate_key(self, name: ResourceName, successor: str, overlap: float, options: WriteOptions) -> IssuedKey:
        said: dict[str, Any] = _said(options) | {"name": str(name), "etag": options.etag}
        request = pb.RotateKeyRequest(successor_id=successor, overlap_seconds=overlap, **said)
        answer = await self._call(self._stub.RotateKey, request)
        return IssuedKey(versioned_key(answer.key), answer.secret)

    async def revoke_key(self, name: ResourceName, options: WriteOptions) -> Versioned:
        request = pb.RevokeKeyRequest(name=str(name), etag=options.etag, **_said(options))
        return versioned_key((await self._call(self._stub.RevokeKey, request)).key)

    # --- reports ----------------------------------------------------------------------------------------------------

    async def quota(self, name: ResourceName, model: str) -> Sequence[QuotaBalance]:
        answer = await self._call(self._stub.GetQuota, pb.GetQuotaRequest(name=str(name), model=model))
        return tuple(map(wire.balance_from_wire, answer.balances))

    async def explain(self, tenant: ResourceName, request_id: str) -> RefusalNote:
        request = pb.ExplainRefusalRequest(parent=str(tenant), request_id=request_id)
        return wire.note_from_wire(await self._call(self._stub.ExplainRefusal, request))

    async def alerts(self, parent: ResourceName, paging: Paging) -> AlertPage:
        request = pb.ListQuotaAlertsRequest(parent=str(parent), page_size=paging.size, page_token=paging.token)
        answer = await self._call(self._stub.ListQuotaAlerts, request)
        return AlertPage(tuple(map(wire.alert_from_wire, answer.alerts)), answer.next_page_token)

    async def sum_usage(self, query: UsageQuery, group: UsageGroup) -> Sequence[UsageSum]:
        request = pb.QueryUsageRequest(filter=wire.filter_to_wire(query), group=enum_name("USAGE_GROUP", group))
        answer = await self._call(self._stub.QueryUsage, request)
        return tuple(map(wire.sum_from_wire, answer.sums))

    async def export_usage(self, query: UsageQuery) -> AsyncGenerator[LedgerEntry, None]:
        request = pb.ExportUsageRequest(filter=wire.filter_to_wire(query))
        call = self._stub.ExportUsage(request, metadata=self._channel.metadata())
        try:
            async for answer in call:
                for entry in answer.entries:
                    yield wire.entry_from_wire(entry)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._channel.address) from error
        finally:
            call.cancel()

    async def audit(self, parent: ResourceName, paging: Paging) -> AuditPage:
        request = pb.ListAuditEntriesRequest(parent=str(parent), page_size=paging.size, page_token=paging.token)
        answer = await self._call(self._stub.ListAuditEntries, request)
        return AuditPage(tuple(map(wire.audit_from_wire, answer.entries)), answer.next_page_token)

    async def _call(self, method: grpc.aio.UnaryUnaryMultiCallable[Any, T], request: object) -> T:
        call: Awaitable[T] = method(request, timeout=self._limit, metadata=self._channel.metadata())
        return await self._channel.answer_soon(call, self._limit)


def _said(options: WriteOptions) -> dict[str, Any]:
    return {"request_id": options.request_id, "validate_only": options.validate_only}
