"""Credentials of munge: who a message is from, as all of Slurm's daemons know it. Binds libmunge, starts no program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sluice.base.errors import SluiceError

MAX_PAYLOAD = 760 << 10
"""Bytes. munged takes messages of 1 MiB; a credential of 786,326 bytes, however well they pack, is the largest."""
_LIBRARY = "libmunge.so.2"
_UID_RESTRICTION = 9  # MUNGE_OPT_UID_RESTRICTION
_DEFINITIONS = """
typedef struct munge_ctx *munge_ctx_t;
int munge_encode(char **cred, munge_ctx_t ctx, const void *buf, int len);
int munge_decode(const char *cred, munge_ctx_t ctx, void **buf, int *len, uint32_t *uid, uint32_t *gid);
const char *munge_strerror(int e);
munge_ctx_t munge_ctx_create(void);
void munge_ctx_destroy(munge_ctx_t ctx);
int munge_ctx_set(munge_ctx_t ctx, int opt, ...);
const char *munge_ctx_strerror(munge_ctx_t ctx);
void free(void *memory);
"""


class MungeError(SluiceError):
    """munged does not answer, or a credential is not valid: forged, expired, used before, or for others."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a credential carried, and who made it."""

    payload: bytes
    uid: int
    gid: int


@cache
def _load() -> tuple[Any, Any, Any]:
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(_DEFINITIONS)
    try:
        return ffi, ffi.dlopen(_LIBRARY), ffi.dlopen(None)
    except OSError as error:
        raise MungeError(f"{_LIBRARY}: {error}", remedy="install munge, as Slurm's auth/munge needs it") from error


def prepare() -> None:
    """Load the library now, e.g. while this process may still read Python's packages. Raises MungeError."""
    _load()


def encode(payload: bytes, *, readable_by: int | None = None) -> str:
    """A credential of this process's user around `payload`, encrypted. `readable_by`: the one user who may decode it.

    Raises MungeError.
    """
    if len(payload) > MAX_PAYLOAD:
        raise MungeError(f"munge: a message of {len(payload)} bytes", remedy=f"send at most {MAX_PAYLOAD}")
    ffi, lib, libc = _load()
    context, credential = lib.munge_ctx_create(), ffi.new("char **")
    if not context:
        raise MungeError("munge: out of memory")
    try:
        if readable_by is not None:
            _check(lib.munge_ctx_set(context, _UID_RESTRICTION, ffi.cast("uint32_t", readable_by)), context)
        _check(lib.munge_encode(credential, context, payload, len(payload)), context)
        text: bytes = ffi.string(credential[0])
        return text.decode("ascii")
    finally:
        if credential[0]:
            libc.free(credential[0])
        lib.munge_ctx_destroy(context)


def decode(credential: str) -> Message:
    """What the credential carries. munged refuses one that was decoded before on this host. Raises MungeError."""
    ffi, lib, libc = _load()
    try:
        raw = credential.encode("ascii")
    except UnicodeEncodeError as error:
        raise MungeError("munge: not a credential") from error
    if b"\0" in raw:
        raise MungeError("munge: not a credential")
    buffer, length = ffi.new("void **"), ffi.new("int *")
    uid, gid = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    try:
        code = lib.munge_decode(raw, ffi.NULL, buffer, length, uid, gid)
        if code != 0:
            raise MungeError(f"munge: {ffi.string(lib.munge_strerror(code)).decode()}")
        payload = bytes(ffi.buffer(buffer[0], length[0])) if length[0] > 0 else b""
        return Message(payload, int(uid[0]), int(gid[0]))
    finally:
        if buffer[0]:
            libc.free(buffer[0])


def _check(code: int, context: Any) -> None:
    if code == 0:
        return
    ffi, lib, _ = _load()
    said = lib.munge_ctx_strerror(context) or lib.munge_strerror(code)
    raise MungeError(f"munge: {ffi.string(said).decode()}", remedy="check that munged runs on this host")
