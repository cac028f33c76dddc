"""What tenants may have of one GPU, from the compiled policy on this node; the last good one stays in force."""

from __future__ import annotations

from pathlib import Path

from sluice.base.errors import SluiceError

_MIB = 1 << 20


class Caps:
    """Bytes per GPU by account; read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._caps: dict[str, int] | None = None
        self._problem: SluiceError | None = None

    def of(self, account: str) -> int | None:
        """The cap of an account; None without one. Raises SluiceError when there never was a policy that can be read.

        A site without a compiled policy has no caps.
        """
        try:
            state = self.path.stat()
        except FileNotFoundError:
            if self._caps is None:
                return None
            return self._caps.get(account)  # there was a file before: the last good one stays
        stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
        if stamp != self._stamp:
            self._read()
            self._stamp = stamp
        if self._caps is None:
            assert self._problem is not None  # noqa: S101 - a file that was read, or was not
            raise self._problem
        return self._caps.get(account)

    def _read(self) -> None:
        from policy.compiled import parse

        try:
            policy, _ = parse(self.path.read_bytes(), source=str(self.path))
        except OSError as error:
            self._problem = SluiceError(f"{self.path}: {error.strerror}", remedy="write it with: sluice apply")
        except SluiceError as error:
            self._problem = error
        else:
            self._problem = None
            self._caps = {
                tenant.account: tenant.gpu_memory_mib_per_gpu * _MIB
                for tenant in policy.tenants
                if tenant.gpu_memory_mib_per_gpu is not None
            }

    @property
    def problem(self) -> SluiceError | None:
        """Why the file on disk is not the one in force."""
        return self._problem
