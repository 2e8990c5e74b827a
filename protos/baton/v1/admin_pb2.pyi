import datetime

from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AwayPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AWAY_POLICY_UNSPECIFIED: _ClassVar[AwayPolicy]
    AWAY_POLICY_BOUNDED_LOCAL: _ClassVar[AwayPolicy]
    AWAY_POLICY_CLOSED: _ClassVar[AwayPolicy]
    AWAY_POLICY_OPEN: _ClassVar[AwayPolicy]

class AdminRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMIN_ROLE_UNSPECIFIED: _ClassVar[AdminRole]
    ADMIN_ROLE_NONE: _ClassVar[AdminRole]
    ADMIN_ROLE_VIEWER: _ClassVar[AdminRole]
    ADMIN_ROLE_TENANT_ADMIN: _ClassVar[AdminRole]
    ADMIN_ROLE_PLATFORM_ADMIN: _ClassVar[AdminRole]

class QuotaLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUOTA_LEVEL_UNSPECIFIED: _ClassVar[QuotaLevel]
    QUOTA_LEVEL_ORGANIZATION: _ClassVar[QuotaLevel]
    QUOTA_LEVEL_TENANT: _ClassVar[QuotaLevel]
    QUOTA_LEVEL_KEY: _ClassVar[QuotaLevel]

class QuotaMetric(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUOTA_METRIC_UNSPECIFIED: _ClassVar[QuotaMetric]
    QUOTA_METRIC_REQUESTS_PER_MINUTE: _ClassVar[QuotaMetric]
    QUOTA_METRIC_INPUT_TOKENS_PER_MINUTE: _ClassVar[QuotaMetric]
    QUOTA_METRIC_OUTPUT_TOKENS_PER_MINUTE: _ClassVar[QuotaMetric]
    QUOTA_METRIC_TOKENS_PER_MINUTE: _ClassVar[QuotaMetric]
    QUOTA_METRIC_TOKENS_PER_DAY: _ClassVar[QuotaMetric]
    QUOTA_METRIC_TOKENS_PER_MONTH: _ClassVar[QuotaMetric]
    QUOTA_METRIC_CONCURRENCY: _ClassVar[QuotaMetric]
    QUOTA_METRIC_BURST: _ClassVar[QuotaMetric]

class UsageGroup(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    USAGE_GROUP_UNSPECIFIED: _ClassVar[UsageGroup]
    USAGE_GROUP_TENANT: _ClassVar[UsageGroup]
    USAGE_GROUP_KEY: _ClassVar[UsageGroup]
    USAGE_GROUP_MODEL: _ClassVar[UsageGroup]

class ChargeReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHARGE_REASON_UNSPECIFIED: _ClassVar[ChargeReason]
    CHARGE_REASON_SETTLED: _ClassVar[ChargeReason]
    CHARGE_REASON_EXPIRED: _ClassVar[ChargeReason]
    CHARGE_REASON_LATE: _ClassVar[ChargeReason]
    CHARGE_REASON_UNRESERVED: _ClassVar[ChargeReason]
AWAY_POLICY_UNSPECIFIED: AwayPolicy
AWAY_POLICY_BOUNDED_LOCAL: AwayPolicy
AWAY_POLICY_CLOSED: AwayPolicy
AWAY_POLICY_OPEN: AwayPolicy
ADMIN_ROLE_UNSPECIFIED: AdminRole
ADMIN_ROLE_NONE: AdminRole
ADMIN_ROLE_VIEWER: AdminRole
ADMIN_ROLE_TENANT_ADMIN: AdminRole
ADMIN_ROLE_PLATFORM_ADMIN: AdminRole
QUOTA_LEVEL_UNSPECIFIED: QuotaLevel
QUOTA_LEVEL_ORGANIZATION: QuotaLevel
QUOTA_LEVEL_TENANT: QuotaLevel
QUOTA_LEVEL_KEY: QuotaLevel
QUOTA_METRIC_UNSPECIFIED: QuotaMetric
QUOTA_METRIC_REQUESTS_PER_MINUTE: QuotaMetric
QUOTA_METRIC_INPUT_TOKENS_PER_MINUTE: QuotaMetric
QUOTA_METRIC_OUTPUT_TOKENS_PER_MINUTE: QuotaMetric
QUOTA_METRIC_TOKENS_PER_MINUTE: QuotaMetric
QUOTA_METRIC_TOKENS_PER_DAY: QuotaMetric
QUOTA_METRIC_TOKENS_PER_MONTH: QuotaMetric
QUOTA_METRIC_CONCURRENCY: QuotaMetric
QUOTA_METRIC_BURST: QuotaMetric
USAGE_GROUP_UNSPECIFIED: UsageGroup
USAGE_GROUP_TENANT: UsageGroup
USAGE_GROUP_KEY: UsageGroup
USAGE_GROUP_MODEL: UsageGroup
CHARGE_REASON_UNSPECIFIED: ChargeReason
CHARGE_REASON_SETTLED: ChargeReason
CHARGE_REASON_EXPIRED: ChargeReason
CHARGE_REASON_LATE: ChargeReason
CHARGE_REASON_UNRESERVED: ChargeReason

class Limits(_message.Message):
    __slots__ = ("requests_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month", "concurrency", "burst", "shadow")
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MONTH_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    BURST_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    requests_per_minute: int
    input_tokens_per_minute: int
    output_tokens_per_minute: int
    tokens_per_minute: int
    tokens_per_day: int
    tokens_per_month: int
    concurrency: int
    burst: int
    shadow: _containers.RepeatedScalarFieldContainer[QuotaMetric]
    def __init__(self, requests_per_minute: _Optional[int] = ..., input_tokens_per_minute: _Optional[int] = ..., output_tokens_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., tokens_per_day: _Optional[int] = ..., tokens_per_month: _Optional[int] = ..., concurrency: _Optional[int] = ..., burst: _Optional[int] = ..., shadow: _Optional[_Iterable[_Union[QuotaMetric, str]]] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("model", "limits")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    model: str
    limits: Limits
    def __init__(self, model: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class ModelList(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[str]] = ...) -> None: ...

class RecordWarning(_message.Message):
    __slots__ = ("field", "message")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    field: str
    message: str
    def __init__(self, field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Organization(_message.Message):
    __slots__ = ("name", "etag", "limits", "model_limits", "time_zone")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_LIMITS_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    limits: Limits
    model_limits: _containers.RepeatedCompositeFieldContainer[ModelLimits]
    time_zone: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., model_limits: _Optional[_Iterable[_Union[ModelLimits, _Mapping]]] = ..., time_zone: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "etag", "limits", "model_limits", "time_zone", "tier", "models", "sharing_group", "away", "max_kv_blocks", "pool", "warnings", "uid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_LIMITS_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SHARING_GROUP_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    limits: Limits
    model_limits: _containers.RepeatedCompositeFieldContainer[ModelLimits]
    time_zone: str
    tier: _types_pb2.Tier
    models: ModelList
    sharing_group: str
    away: AwayPolicy
    max_kv_blocks: int
    pool: str
    warnings: _containers.RepeatedCompositeFieldContainer[RecordWarning]
    uid: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., model_limits: _Optional[_Iterable[_Union[ModelLimits, _Mapping]]] = ..., time_zone: _Optional[str] = ..., tier: _Optional[_Union[_types_pb2.Tier, str]] = ..., models: _Optional[_Union[ModelList, _Mapping]] = ..., sharing_group: _Optional[str] = ..., away: _Optional[_Union[AwayPolicy, str]] = ..., max_kv_blocks: _Optional[int] = ..., pool: _Optional[str] = ..., warnings: _Optional[_Iterable[_Union[RecordWarning, _Mapping]]] = ..., uid: _Optional[str] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("name", "etag", "limits", "model_limits", "prefix", "create_time", "expire_time", "revoke_time", "models", "priority", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_LIMITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    REVOKE_TIME_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    limits: Limits
    model_limits: _containers.RepeatedCompositeFieldContainer[ModelLimits]
    prefix: str
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    revoke_time: _timestamp_pb2.Timestamp
    models: ModelList
    priority: int
    role: AdminRole
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., model_limits: _Optional[_Iterable[_Union[ModelLimits, _Mapping]]] = ..., prefix: _Optional[str] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoke_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., models: _Optional[_Union[ModelList, _Mapping]] = ..., priority: _Optional[int] = ..., role: _Optional[_Union[AdminRole, str]] = ...) -> None: ...

class GetOrganizationRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetOrganizationResponse(_message.Message):
    __slots__ = ("organization",)
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    organization: Organization
    def __init__(self, organization: _Optional[_Union[Organization, _Mapping]] = ...) -> None: ...

class ListOrganizationsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOrganizationsResponse(_message.Message):
    __slots__ = ("organizations", "next_page_token")
    ORGANIZATIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    organizations: _containers.RepeatedCompositeFieldContainer[Organization]
    next_page_token: str
    def __init__(self, organizations: _Optional[_Iterable[_Union[Organization, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateOrganizationRequest(_message.Message):
    __slots__ = ("organization_id", "organization", "request_id", "validate_only")
    ORGANIZATION_ID_FIELD_NUMBER: _ClassVar[int]
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    organization_id: str
    organization: Organization
    request_id: str
    validate_only: bool
    def __init__(self, organization_id: _Optional[str] = ..., organization: _Optional[_Union[Organization, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class CreateOrganizationResponse(_message.Message):
    __slots__ = ("organization",)
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    organization: Organization
    def __init__(self, organization: _Optional[_Union[Organization, _Mapping]] = ...) -> None: ...

class UpdateOrganizationRequest(_message.Message):
    __slots__ = ("organization", "update_mask", "request_id", "validate_only")
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    organization: Organization
    update_mask: _field_mask_pb2.FieldMask
    request_id: str
    validate_only: bool
    def __init__(self, organization: _Optional[_Union[Organization, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UpdateOrganizationResponse(_message.Message):
    __slots__ = ("organization",)
    ORGANIZATION_FIELD_NUMBER: _ClassVar[int]
    organization: Organization
    def __init__(self, organization: _Optional[_Union[Organization, _Mapping]] = ...) -> None: ...

class DeleteOrganizationRequest(_message.Message):
    __slots__ = ("name", "etag", "force", "request_id", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    force: bool
    request_id: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., force: _Optional[bool] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class DeleteOrganizationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTenantRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateTenantRequest(_message.Message):
    __slots__ = ("parent", "tenant_id", "tenant", "request_id", "validate_only")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    tenant_id: str
    tenant: Tenant
    request_id: str
    validate_only: bool
    def __init__(self, parent: _Optional[str] = ..., tenant_id: _Optional[str] = ..., tenant: _Optional[_Union[Tenant, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class CreateTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class UpdateTenantRequest(_message.Message):
    __slots__ = ("tenant", "update_mask", "request_id", "validate_only")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    update_mask: _field_mask_pb2.FieldMask
    request_id: str
    validate_only: bool
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UpdateTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ...) -> None: ...

class DeleteTenantRequest(_message.Message):
    __slots__ = ("name", "etag", "force", "request_id", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    force: bool
    request_id: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., force: _Optional[bool] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class DeleteTenantResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetKeyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys", "next_page_token")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    next_page_token: str
    def __init__(self, keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("parent", "key_id", "key", "request_id", "validate_only")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    parent: str
    key_id: str
    key: Key
    request_id: str
    validate_only: bool
    def __init__(self, parent: _Optional[str] = ..., key_id: _Optional[str] = ..., key: _Optional[_Union[Key, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("key", "secret")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    key: Key
    secret: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class UpdateKeyRequest(_message.Message):
    __slots__ = ("key", "update_mask", "request_id", "validate_only")
    KEY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    update_mask: _field_mask_pb2.FieldMask
    request_id: str
    validate_only: bool
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class UpdateKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("name", "etag", "successor_id", "overlap_seconds", "request_id", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_ID_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    successor_id: str
    overlap_seconds: float
    request_id: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., successor_id: _Optional[str] = ..., overlap_seconds: _Optional[float] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class RotateKeyResponse(_message.Message):
    __slots__ = ("key", "secret")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    key: Key
    secret: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("name", "etag", "request_id", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    request_id: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: Key
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...

class DeleteKeyRequest(_message.Message):
    __slots__ = ("name", "etag", "request_id", "validate_only")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    request_id: str
    validate_only: bool
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ..., request_id: _Optional[str] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class DeleteKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotaBalance(_message.Message):
    __slots__ = ("level", "subject", "model", "metric", "limit", "used", "reserved", "resets_after_seconds")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    RESETS_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    level: QuotaLevel
    subject: str
    model: str
    metric: QuotaMetric
    limit: int
    used: int
    reserved: int
    resets_after_seconds: float
    def __init__(self, level: _Optional[_Union[QuotaLevel, str]] = ..., subject: _Optional[str] = ..., model: _Optional[str] = ..., metric: _Optional[_Union[QuotaMetric, str]] = ..., limit: _Optional[int] = ..., used: _Optional[int] = ..., reserved: _Optional[int] = ..., resets_after_seconds: _Optional[float] = ...) -> None: ...

class QuotaRefusal(_message.Message):
    __slots__ = ("level", "subject", "model", "metric", "limit", "used", "reserved", "requested", "retry_after_seconds")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    level: QuotaLevel
    subject: str
    model: str
    metric: QuotaMetric
    limit: int
    used: int
    reserved: int
    requested: int
    retry_after_seconds: float
    def __init__(self, level: _Optional[_Union[QuotaLevel, str]] = ..., subject: _Optional[str] = ..., model: _Optional[str] = ..., metric: _Optional[_Union[QuotaMetric, str]] = ..., limit: _Optional[int] = ..., used: _Optional[int] = ..., reserved: _Optional[int] = ..., requested: _Optional[int] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class QuotaAlert(_message.Message):
    __slots__ = ("level", "subject", "model", "metric", "window_start", "percent", "limit", "used", "id", "time")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    WINDOW_START_FIELD_NUMBER: _ClassVar[int]
    PERCENT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    level: QuotaLevel
    subject: str
    model: str
    metric: QuotaMetric
    window_start: _timestamp_pb2.Timestamp
    percent: int
    limit: int
    used: int
    id: str
    time: _timestamp_pb2.Timestamp
    def __init__(self, level: _Optional[_Union[QuotaLevel, str]] = ..., subject: _Optional[str] = ..., model: _Optional[str] = ..., metric: _Optional[_Union[QuotaMetric, str]] = ..., window_start: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., percent: _Optional[int] = ..., limit: _Optional[int] = ..., used: _Optional[int] = ..., id: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetQuotaRequest(_message.Message):
    __slots__ = ("name", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class GetQuotaResponse(_message.Message):
    __slots__ = ("balances",)
    BALANCES_FIELD_NUMBER: _ClassVar[int]
    balances: _containers.RepeatedCompositeFieldContainer[QuotaBalance]
    def __init__(self, balances: _Optional[_Iterable[_Union[QuotaBalance, _Mapping]]] = ...) -> None: ...

class ExplainRefusalRequest(_message.Message):
    __slots__ = ("parent", "request_id")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    parent: str
    request_id: str
    def __init__(self, parent: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ExplainRefusalResponse(_message.Message):
    __slots__ = ("request_id", "time", "tenant", "key_id", "model", "input_tokens", "output_tokens", "refusals")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    time: _timestamp_pb2.Timestamp
    tenant: str
    key_id: str
    model: str
    input_tokens: int
    output_tokens: int
    refusals: _containers.RepeatedCompositeFieldContainer[QuotaRefusal]
    def __init__(self, request_id: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tenant: _Optional[str] = ..., key_id: _Optional[str] = ..., model: _Optional[str] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[QuotaRefusal, _Mapping]]] = ...) -> None: ...

class ListQuotaAlertsRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListQuotaAlertsResponse(_message.Message):
    __slots__ = ("alerts", "next_page_token")
    ALERTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    alerts: _containers.RepeatedCompositeFieldContainer[QuotaAlert]
    next_page_token: str
    def __init__(self, alerts: _Optional[_Iterable[_Union[QuotaAlert, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UsageFilter(_message.Message):
    __slots__ = ("parent", "start_time", "end_time", "model")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    parent: str
    start_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    model: str
    def __init__(self, parent: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class UsageSum(_message.Message):
    __slots__ = ("subject", "requests", "input_tokens", "cached_tokens", "output_tokens", "cost", "energy_millijoules")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MILLIJOULES_FIELD_NUMBER: _ClassVar[int]
    subject: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    energy_millijoules: int
    def __init__(self, subject: _Optional[str] = ..., requests: _Optional[int] = ..., input_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cost: _Optional[int] = ..., energy_millijoules: _Optional[int] = ...) -> None: ...

class QueryUsageRequest(_message.Message):
    __slots__ = ("filter", "group")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    filter: UsageFilter
    group: UsageGroup
    def __init__(self, filter: _Optional[_Union[UsageFilter, _Mapping]] = ..., group: _Optional[_Union[UsageGroup, str]] = ...) -> None: ...

class QueryUsageResponse(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.RepeatedCompositeFieldContainer[UsageSum]
    def __init__(self, sums: _Optional[_Iterable[_Union[UsageSum, _Mapping]]] = ...) -> None: ...

class ExportUsageRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: UsageFilter
    def __init__(self, filter: _Optional[_Union[UsageFilter, _Mapping]] = ...) -> None: ...

class UsageEntry(_message.Message):
    __slots__ = ("id", "admit_time", "reason", "request_id", "tenant", "key_id", "model", "requests", "input_tokens", "cached_tokens", "output_tokens", "cost", "energy_millijoules")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADMIT_TIME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MILLIJOULES_FIELD_NUMBER: _ClassVar[int]
    id: str
    admit_time: _timestamp_pb2.Timestamp
    reason: ChargeReason
    request_id: str
    tenant: str
    key_id: str
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    energy_millijoules: int
    def __init__(self, id: _Optional[str] = ..., admit_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[_Union[ChargeReason, str]] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., key_id: _Optional[str] = ..., model: _Optional[str] = ..., requests: _Optional[int] = ..., input_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cost: _Optional[int] = ..., energy_millijoules: _Optional[int] = ...) -> None: ...

class ExportUsageResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[UsageEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[UsageEntry, _Mapping]]] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("id", "time", "actor", "action", "resource", "before", "after", "request_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    time: _timestamp_pb2.Timestamp
    actor: str
    action: str
    resource: str
    before: str
    after: str
    request_id: str
    def __init__(self, id: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., actor: _Optional[str] = ..., action: _Optional[str] = ..., resource: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ListAuditEntriesRequest(_message.Message):
    __slots__ = ("parent", "page_size", "page_token")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parent: str
    page_size: int
    page_token: str
    def __init__(self, parent: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListAuditEntriesResponse(_message.Message):
    __slots__ = ("entries", "next_page_token")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    next_page_token: str
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
