"""AdminApi over gRPC: the service. Who calls is told by the API key that each call brings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

import grpc.aio

from baton.core.admin_api import AdminApi
from baton.core.resource_names import parse_resource_name
from baton.core.streams import closing
from baton.core.tenancy import check_name
from baton.core.types import (
    Account,
    KeyRecord,
    LedgerEntry,
    Organisation,
    Paging,
    RecordKind,
    RecordPage,
    ResourceName,
    Tenant,
    Versioned,
    WriteOptions,
)
from baton.rpc.api_key import presented_key
from baton.rpc.calls import Calls
from baton.rpc.serving import Service
from baton.rpc.wire import admin as wire
from baton.rpc.wire.guard import require
from baton.rpc.wire.records import (
    key_from_wire,
    key_to_wire,
    organisation_from_wire,
    organisation_to_wire,
    tenant_from_wire,
    tenant_to_wire,
)
from protos.baton.v1 import admin_pb2 as pb
from protos.baton.v1 import admin_pb2_grpc

NAME: Final = "baton.v1.AdminService"
EXPORTED_AT_ONCE: Final = 500  # entries of one message

Context = grpc.aio.ServicerContext[Any, Any]
Authenticate = Callable[[str | None], Awaitable[Account]]
_ORGANISATION, _TENANT, _KEY = RecordKind.ORGANISATION, RecordKind.TENANT, RecordKind.KEY


def admin_service(admin: AdminApi, authenticate: Authenticate) -> Service:
    """``authenticate`` says whose key it is, or raises Unauthenticated."""

    def mount(server: grpc.aio.Server, calls: Calls) -> None:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Servicer(admin, authenticate), server)

    return Service(NAME, mount)


class _Organizations(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, admin: AdminApi, authenticate: Authenticate) -> None:
        self._admin = admin
        self._authenticate = authenticate

    async def GetOrganization(self, request: pb.GetOrganizationRequest, context: Context) -> pb.GetOrganizationResponse:
        found = await self._get(request.name, _ORGANISATION, context)
        return pb.GetOrganizationResponse(organization=_organisation(found))

    async def ListOrganizations(
        self, request: pb.ListOrganizationsRequest, context: Context
    ) -> pb.ListOrganizationsResponse:
        page = await self._list(ResourceName(), request, context)
        found = map(_organisation, page.records)
        return pb.ListOrganizationsResponse(organizations=found, next_page_token=page.next_token)

    async def CreateOrganization(
        self, request: pb.CreateOrganizationRequest, context: Context
    ) -> pb.CreateOrganizationResponse:
        caller = await self._caller(context)
        name = _child("organization_id", ResourceName(), request.organization_id)
        record = organisation_from_wire(request.organization)
        made = await self._admin.create(name, record, _options(request), caller)
        return pb.CreateOrganizationResponse(organization=_organisation(made))

    async def UpdateOrganization(
        self, request: pb.UpdateOrganizationRequest, context: Context
    ) -> pb.UpdateOrganizationResponse:
        caller, given = await self._caller(context), request.organization
        name = parse_resource_name("organization.name", given.name, _ORGANISATION)
        options, mask = _options(request, given.etag), tuple(request.update_mask.paths)
        made = await self._admin.update(name, organisation_from_wire(given), mask, options, caller)
        return pb.UpdateOrganizationResponse(organization=_organisation(made))

    async def DeleteOrganization(
        self, request: pb.DeleteOrganizationRequest, context: Context
    ) -> pb.DeleteOrganizationResponse:
        caller = await self._caller(context)
        name = parse_resource_name("name", request.name, _ORGANISATION)
        await self._admin.delete(name, _options(request, request.etag), request.force, caller)
        return pb.DeleteOrganizationResponse()

    # --- what all have in common ------------------------------------------------------------------------------------

    async def _caller(self, context: Context) -> Account:
        return await self._authenticate(presented_key(context))

    async def _get(self, name: str, kind: RecordKind, context: Context) -> Versioned:
        caller = await self._caller(context)
        return await self._admin.get(parse_resource_name("name", name, kind), caller)

    async def _list(
        self,
        parent: ResourceName,
        request: pb.ListOrganizationsRequest | pb.ListTenantsRequest | pb.ListKeysRequest,
        context: Context,
    ) -> RecordPage:
        caller = await self._caller(context)
        if request.page_token:
            check_name("page_token", request.page_token)
        return await self._admin.list(parent, Paging(request.page_size, request.page_token), caller)


class _Tenants(_Organizations):
    async def GetTenant(self, request: pb.GetTenantRequest, context: Context) -> pb.GetTenantResponse:
        return pb.GetTenantResponse(tenant=_tenant(await self._get(request.name, _TENANT, context)))

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsResponse:
        page = await self._list(parse_resource_name("parent", request.parent, _ORGANISATION), request, context)
        return pb.ListTenantsResponse(tenants=map(_tenant, page.records), next_page_token=page.next_token)

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: Context) -> pb.CreateTenantResponse:
        caller = await self._caller(context)
        parent = parse_resource_name("parent", request.parent, _ORGANISATION)
        name = _child("tenant_id", parent, request.tenant_id)
        made = await self._admin.create(name, tenant_from_wire(request.tenant), _options(request), caller)
        return pb.CreateTenantResponse(tenant=_tenant(made))

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, context: Context) -> pb.UpdateTenantResponse:
        caller, given = await self._caller(context), request.tenant
        name = parse_resource_name("tenant.name", given.name, _TENANT)
        options, mask = _options(request, given.etag), tuple(request.update_mask.paths)
        made = await self._admin.update(name, tenant_from_wire(given), mask, options, caller)
        return pb.UpdateTenantResponse(tenant=_tenant(made))

    async def DeleteTenant(self, request: pb.DeleteTenantRequest, context: Context) -> pb.DeleteTenantResponse:
        caller = await self._caller(context)
        name = parse_resource_name("name", request.name, _TENANT)
        await self._admin.delete(name, _options(request, request.etag), request.force, caller)
        return pb.DeleteTenantResponse()


class _Keys(_Tenants):
    async def GetKey(self, request: pb.GetKeyRequest, context: Context) -> pb.GetKeyResponse:
        return pb.GetKeyResponse(key=_key(await self._get(request.name, _KEY, context)))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        page = await self._list(parse_resource_name("parent", request.parent, _TENANT), request, context)
        return pb.ListKeysResponse(keys=map(_key, page.records), next_page_token=page.next_token)

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        caller = await self._caller(context)
        parent = parse_resource_name("parent", request.parent, _TENANT)
        name = _child("key_id", parent, request.key_id) if request.key_id else parent
        issued = await self._admin.issue_key(name, key_from_wire(request.key), _options(request), caller)
        return pb.CreateKeyResponse(key=_key(issued.key), secret=issued.secret)

    async def UpdateKey(self, request: pb.UpdateKeyRequest, context: Context) -> pb.UpdateKeyResponse:
        caller, given = await self._caller(context), request.key
        name = parse_resource_name("key.name", given.name, _KEY)
        options, mask = _options(request, given.etag), tuple(request.update_mask.paths)
        made = await self._admin.update(name, key_from_wire(given), mask, options, caller)
        return pb.UpdateKeyResponse(key=_key(made))

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        caller = await self._caller(context)
        name, options = parse_resource_name("name", request.name, _KEY), _options(request, request.etag)
        if request.successor_id:
            _child("successor_id", name.parent, request.successor_id)
        overlap = request.overlap_seconds
        issued = await self._admin.rotate_key(name, request.successor_id, overlap, options, caller)
        return pb.RotateKeyResponse(key=_key(issued.key), secret=issued.secret)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        caller = await self._caller(context)
        name = parse_resource_name("name", request.name, _KEY)
        made = await self._admin.revoke_key(name, _options(request, request.etag), caller)
        return pb.RevokeKeyResponse(key=_key(made))

    async def DeleteKey(self, request: pb.DeleteKeyRequest, context: Context) -> pb.DeleteKeyResponse:
        caller = await self._caller(context)
        name = parse_resource_name("name", request.name, _KEY)
        await self._admin.delete(name, _options(request, request.etag), force=False, caller=caller)
        return pb.DeleteKeyResponse()


class _Servicer(_Keys):
    async def GetQuota(self, request: pb.GetQuotaRequest, context: Context) -> pb.GetQuotaResponse:
        caller = await self._caller(context)
        name = parse_resource_name("name", request.name, *RecordKind)
        balances = await self._admin.quota(name, request.model, caller)
        return pb.GetQuotaResponse(balances=map(wire.balance_to_wire, balances))

    async def ExplainRefusal(self, request: pb.ExplainRefusalRequest, context: Context) -> pb.ExplainRefusalResponse:
        require(request, "request_id")
        caller = await self._caller(context)
        tenant = parse_resource_name("parent", request.parent, _TENANT) if request.parent else ResourceName()
        return wire.note_to_wire(await self._admin.explain(tenant, request.request_id, caller))

    async def ListQuotaAlerts(self, request: pb.ListQuotaAlertsRequest, context: Context) -> pb.ListQuotaAlertsResponse:
        caller = await self._caller(context)
        kinds = (_ORGANISATION, _TENANT) if request.parent else ()
        parent = parse_resource_name("parent", request.parent, *kinds)
        page = await self._admin.alerts(parent, Paging(request.page_size, request.page_token), caller)
        alerts = map(wire.alert_to_wire, page.alerts)
        return pb.ListQuotaAlertsResponse(alerts=alerts, next_page_token=page.next_token)

    async def QueryUsage(self, request: pb.QueryUsageRequest, context: Context) -> pb.QueryUsageResponse:
        require(request, "filter")
        caller = await self._caller(context)
        query, group = wire.filter_from_wire(request.filter), wire.group_from_wire(request)
        sums = await self._admin.sum_usage(query, group, caller)
        return pb.QueryUsageResponse(sums=map(wire.sum_to_wire, sums))

    async def ExportUsage(  # type: ignore[override]
        self, request: pb.ExportUsageRequest, context: Context
    ) -> AsyncIterator[pb.ExportUsageResponse]:
        require(request, "filter")
        caller = await self._caller(context)
        batch: list[LedgerEntry] = []
        async with closing(self._admin.export_usage(wire.filter_from_wire(request.filter), caller)) as entries:
            async for entry in entries:
                batch.append(entry)
                if len(batch) == EXPORTED_AT_ONCE:
                    yield pb.ExportUsageResponse(entries=map(wire.entry_to_wire, batch))
                    batch.clear()
        if batch:
            yield pb.ExportUsageResponse(entries=map(wire.entry_to_wire, batch))

    async def ListAuditEntries(
        self, request: pb.ListAuditEntriesRequest, context: Context
    ) -> pb.ListAuditEntriesResponse:
        caller = await self._caller(context)
        parent = parse_resource_name("parent", request.parent)
        page = await self._admin.audit(parent, Paging(request.page_size, request.page_token), caller)
        entries = map(wire.audit_to_wire, page.entries)
        return pb.ListAuditEntriesResponse(entries=entries, next_page_token=page.next_token)


def _options(request: Any, etag: str = "") -> WriteOptions:
    """Every request that changes something has these fields."""
    return WriteOptions(etag, request.request_id, request.validate_only)


def _child(field: str, parent: ResourceName, child_id: str) -> ResourceName:
    check_name(field, child_id)
    return parent.child(child_id)


def _organisation(found: Versioned) -> pb.Organization:
    return organisation_to_wire(cast(Organisation, found.record), found.name, found.etag)


def _tenant(found: Versioned) -> pb.Tenant:
    return tenant_to_wire(cast(Tenant, found.record), found.name, found.etag, found.warnings)


def _key(found: Versioned) -> pb.Key:
    return key_to_wire(cast(KeyRecord, found.record), found.name, found.etag)
