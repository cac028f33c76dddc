"""What EC2's errors mean, by their codes."""

from __future__ import annotations

from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

from sluice.fleet.driver import Failure, ProviderError

_CODES: dict[Failure, tuple[str, ...]] = {
    "no_capacity": (
        "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity", "SpotMaxPriceTooLow", "Unsupported",
    ),
    "quota": (
        "InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded", "VolumeLimitExceeded",
        "InsufficientFreeAddressesInSubnet", "NetworkInterfaceLimitExceeded",
    ),
    "throttled": ("RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"),
    "credentials": (
        "AuthFailure", "UnauthorizedOperation", "ExpiredToken", "RequestExpired", "InvalidClientTokenId",
        "SignatureDoesNotMatch", "OptInRequired", "Blocked", "AccessDenied", "PendingVerification",
    ),
    "refused": ("IdempotentParameterMismatch",),  # the token is another request's: the settings changed since
}  # fmt: skip
_KIND_OF = {code: kind for kind, codes in _CODES.items() for code in codes}
_REFUSING = ("Invalid", "Missing", "Unknown")
"""How codes of requests begin that are wrong as such."""


def failure_of(error: Exception) -> ProviderError:
    """What an exception of boto3 means."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return ProviderError("credentials", f"EC2: {error}")
    if not isinstance(error, ClientError):
        return ProviderError("unknown", f"EC2: {error}")
    said = error.response.get("Error", {})
    code = str(said.get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    wrong = 400 <= status < 500 and code.startswith(_REFUSING)
    return ProviderError(
        _KIND_OF.get(code, "refused" if wrong else "unknown"), f"EC2: {code}: {said.get('Message', '')}"
    )
