"""What a claim must look like before it touches a counter."""

from __future__ import annotations

from baton.core.errors import InvalidRequest
from baton.core.tenancy import MAX_LIMIT, check_model_name, check_name
from baton.core.types import MAX_REQUEST_ID, Account, QuotaClaim


def check_claim(claim: QuotaClaim) -> str:
    """The reservation's name in its organisation: a request id is its tenant's own."""
    check_payer(claim.account, claim.model)
    return check_request(claim)


def check_payer(account: Account, model: str) -> None:
    """What all claims of a key have in common."""
    check_name("organization", account.organisation.name)
    check_name("tenant", account.tenant.name)
    check_name("key", account.key.id)
    check_model_name("model", model)


def check_request(claim: QuotaClaim) -> str:
    """What a claim of a payer that was checked has of its own. The reservation's name."""
    request_id = claim.request_id
    if not 0 < len(request_id) <= MAX_REQUEST_ID or not request_id.isprintable():
        rule = f"must be 1 to {MAX_REQUEST_ID} printable characters"
        raise InvalidRequest.out_of_range("request_id", repr(request_id[:MAX_REQUEST_ID]), rule)
    for field, tokens in (("input_tokens", claim.input_tokens), ("output_tokens", claim.output_tokens)):
        if not 0 <= tokens <= MAX_LIMIT:
            raise InvalidRequest.out_of_range(field, tokens, f"must be from 0 to {MAX_LIMIT}")
    return member_of(claim.account.tenant.name, request_id)


def member_of(tenant: str, request_id: str) -> str:
    return f"{tenant}/{request_id}"


def size_in_use(claim: QuotaClaim) -> InvalidRequest:
    """The id belongs to another request in progress; taking that over would charge one of the two wrongly."""
    return InvalidRequest(
        f"request_id: {claim.request_id!r} is in use by a request of another size", field="request_id"
    )


def has_ended(claim: QuotaClaim) -> InvalidRequest:
    """Its own settlement or release was here before it: nobody waits for this answer any more."""
    return InvalidRequest(f"request_id: this admission of {claim.request_id!r} has ended", field="request_id")
