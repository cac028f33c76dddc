"""Sluice's plugins in a cluster: built for its Slurm, put where all its hosts see them, named in its slurm.conf."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from dev_cluster.description import Sluice
from dev_cluster.layout import INSIDE, PLUGIN_SEARCH, Layout
from dev_cluster.slurm_tree import SlurmTree
from policy import compiled
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.plugin.builder import SUPERVISOR, PluginBuild, build_plugins, find_source, read_build, write_manifest
from sluice.plugin.site import find_plugin_dir, plugin_parameters

_FOLDER = INSIDE / "plugins"


class ClusterPlugins:
    """The plugins of one cluster. Fetches what it needs at once, so that no cluster starts that cannot be finished."""

    def __init__(self, wanted: Sluice, tree: SlurmTree, progress: Callable[[str], None]) -> None:
        self.wanted = wanted
        self.tree = tree
        self.progress = progress
        self.policy = _policy_text(wanted.policy, journal=wanted.journal)
        self.stock = find_plugin_dir(tree.root or Path("/"), tree.prefix)
        self.version = tree.version()
        self.source, self.folder = None, wanted.plugins
        packaged = tree.packaged()
        if self.folder is None and packaged is not None and not wanted.sanitize:
            self.folder = packaged.folder
        if self.folder is None:
            self.source = find_source(self.version, named=tree.source, installed=tree.include, suite=tree.suite())
        elif not any(self.folder.glob("*.so")):
            raise UsageError(f"sluice.plugins {self.folder}: no plugins there", remedy="name a folder of .so files")

    def write(self, layout: Layout) -> set[str]:
        """Plugins, level, policy and plugstack.conf; the names of the files that belong next to slurm.conf."""
        build = self._build(layout.plugins)
        files = {"sluice.level": self.wanted.level + "\n", "sluice.policy": self.policy}
        if build.has("spank_sluice"):
            files["plugstack.conf"] = f"optional {_FOLDER}/spank_sluice.so\n"
        for name, text in files.items():
            if text:
                write_atomic(layout.slurm / name, text)
        self.build = build
        return {"plugstack.conf"} & set(files)

    def _build(self, folder: Path) -> PluginBuild:
        folder.mkdir(mode=0o755)
        if self.source is not None:
            return build_plugins(
                self.source,
                folder,
                plugin_dir=self.stock,
                root=self.tree.root,
                sanitizer="address" if self.wanted.sanitize else "",
                progress=self.progress,
            )
        for file in (self.folder or Path()).iterdir():
            if file.suffix == ".so" or file.name == SUPERVISOR:
                shutil.copy2(file, folder)
        write_manifest(folder, self.version)
        return read_build(folder)

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """slurm.conf's parameters that load them; after `write`."""
        return plugin_parameters(self.build, folder=PLUGIN_SEARCH, stock=self.stock)

    def links(self) -> list[str]:
        """The command that a controller runs before its slurmctld starts; other hosts find stock Slurm's plugins."""
        return ["ln", "-sf", *(f"{_FOLDER}/{name}" for name in sorted(self.build.files)), f"{PLUGIN_SEARCH}/"]

    def under_supervisor(self, argv: list[str]) -> list[str]:
        """slurmctld's command line, under the supervisor if that is wanted."""
        if not self.wanted.supervise:
            return argv
        return [f"{_FOLDER}/{SUPERVISOR}", "--lease", f"{self.wanted.lease:g}", "--", *argv]

    def node_links(self) -> list[str]:
        """The command that a node with the agent runs before its slurmd starts."""
        names = [name for name in ("prep_script.so", "libsluice_controller.so") if name in self.build.files]
        return ["ln", "-sf", *(f"{_FOLDER}/{name}" for name in names), f"{PLUGIN_SEARCH}/"]

    @property
    def environment(self) -> dict[str, str] | None:
        """What is added to slurmctld's environment."""
        if not self.wanted.sanitize:
            return dict(self.wanted.environment) or None
        library = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
        ).stdout.strip()
        if not library.startswith("/"):
            raise SluiceError("sluice.sanitize: gcc has no libasan", remedy="install libasan8 (with gcc)")
        return {
            "LD_PRELOAD": str(Path(library).resolve()),
            # Slurm's own code has no frame pointers, so each stack is slow to take: no more of it than is looked at.
            "ASAN_OPTIONS": "abort_on_error=0:detect_leaks=1:handle_segv=1:"
            "fast_unwind_on_malloc=0:malloc_context_size=12",
            **self.wanted.environment,
        }


def _policy_text(policy: str, *, journal: bool = False) -> str:
    """The compiled policy, checked as slurmctld's plugins will; sections alone get first line and checksum."""
    source = "sluice.policy" if "\n" in policy else policy
    if policy and "\n" not in policy:
        try:
            policy = Path(policy).read_text()
        except OSError as error:
            raise UsageError(
                f"sluice.policy {source}: {error.strerror}", remedy="name a compiled policy, or write its text"
            ) from error
    if not policy.strip():
        return compiled.CompiledPolicy(settings=compiled.Global(journal=True)).render() if journal else ""
    text = policy if policy.startswith("sluice-policy ") else compiled.complete(policy)
    try:
        parsed, _ = compiled.parse(text.encode(), source=source)
    except SluiceError as error:
        raise UsageError(error.what, remedy="docs/plugins.md describes compiled policies") from error
    if journal:
        on = parsed.settings.model_copy(update={"journal": True})
        return parsed.model_copy(update={"settings": on}).render()
    return text
