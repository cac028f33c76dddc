"""The policy's sections `services` and `serving`: models that run as jobs of tenants, and what gateways let through."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from policy.names import Name, TenantName, UserName
from policy.units import Count, Gpus, Mib, Seconds, parse_seconds
from sluice.exchange.batches import FOLDER as FILES
from sluice.exchange.batches import PROGRAM
from sluice.exchange.requests import FOLDER
from sluice.exchange.serving import DataPath, EngineName, Priority, WithoutAuthority

MOST_SERVICES = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]*")
_HOST_PORT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})")
_KEY = re.compile(r"[0-9a-f]{16}")
_URL = re.compile(r"(https?)://([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?")
_THIS_HOST = re.compile(r"127(\.\d{1,3}){3}|localhost|\[::1\]")
_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_.+-]+)+")
_FILLED = ("socket", "port", "model", "service")
"""Words in braces of a command that the replica fills in."""

_OWN_COMMAND = ("openai", "python")
_ONE_NODE = ("llama.cpp", "tei", "python")
HEALTH: dict[str, str] = {
    "vllm": "/health",
    "sglang": "/health",
    "llama.cpp": "/health",
    "tei": "/health",
    "openai": "/v1/models",
    "python": "/health",
}
"""What is asked of an engine where the service names nothing else."""
_EVERYWHERE = ("--host", "--port", "--api-key", "--served-model-name", "--ssl-keyfile", "--ssl-certfile")
TAKEN: dict[str, tuple[str, ...]] = {
    "vllm": (
        *_EVERYWHERE, "--model", "--uds", "--config", "--root-path", "--ssl-ca-certs", "--ssl-cert-reqs", "--headless",
        "--nnodes", "--node-rank", "--master-addr", "--master-port",
    ),
    "sglang": (
        *_EVERYWHERE, "--model-path", "--model", "--config", "--admin-api-key", "--nnodes", "--node-rank",
        "--dist-init-addr",
    ),
    "llama.cpp": (
        "--host", "--port", "--api-key", "--api-key-file", "--model", "-m", "--model-url", "-mu", "--hf-repo", "-hf",
        "-hfr", "--hf-file", "-hff", "--alias", "-a", "--ssl-key-file", "--ssl-cert-file", "--api-prefix", "--parallel",
        "-np",
    ),
    "tei": (
        "--hostname", "--port", "-p", "--uds-path", "--model-id", "--api-key", "--served-model-name",
        "--prometheus-port",
    ),
}  # fmt: skip
"""By engine: options that the replica sets itself."""


def check_service(name: str) -> str:
    """The name of a service: that by which clients call its model. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r} is not the name of a service; use letters, digits, '-', '_' and '.', at most 64, a letter "
            "or digit first"
        )
    return name


def _path(value: str) -> str:
    if value and (not value.startswith("/") or ".." in value.split("/") or not _TEXT.fullmatch(value)):
        raise ValueError(f"{value[:200]!r} is not an absolute path; write it from / on, without '..'")
    return value


def _word(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _printable(value: str) -> str:
    if not _TEXT.fullmatch(value):
        raise ValueError(f"{value[:80]!r} has control characters; write printable text")
    return value


def _delay(value: object) -> object:
    """``500ms`` or as other times, in seconds."""
    if isinstance(value, bool | int | float):
        raise ValueError(f"{value!r} has no unit: write e.g. {value}ms or {value}s")
    if isinstance(value, str):
        if match := re.fullmatch(r"(\d{1,9})ms", value.strip()):
            return int(match[1]) / 1000
        return float(parse_seconds(value))
    return value


ServiceName = Annotated[str, AfterValidator(check_service)]
FilePath = Annotated[str, Field(max_length=1024), AfterValidator(_path)]
Word = Annotated[str, BeforeValidator(_word), Field(max_length=4096), AfterValidator(_printable)]
Delay = Annotated[float, BeforeValidator(_delay), Field(gt=0, le=3600)]
Bound = Annotated[int, Field(ge=1, le=10**9)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ServiceLimits(_Section):
    """What gateways let through at most; what is left out has no limit. A request over one gets 429, and when to try
    again."""

    requests_per_minute: Bound | None = None
    """Requests a minute. Example: `600`."""
    tokens_per_minute: Bound | None = None
    """Tokens a minute, of prompts and answers. A request's are reserved before, and settled after it. Example:
    `200000`."""
    concurrent: Bound | None = None
    """Requests at once, those that wait included. Example: `32`."""
    queued: Bound | None = None
    """Requests that wait for a replica at once. Example: `100`."""


class TenantServing(ServiceLimits):
    """What gateways let through of one tenant."""

    weight: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Its part of a service that several tenants wait for, next to those of the others. Example: `3`."""
    tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    """Budget of tokens in each `scheduling.usage_period`, of prompts and answers; when they are used, its requests are
    refused. Example: `500000000`."""


class Replicas(_Section):
    """How many replicas there are."""

    least: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Replicas that run always; 0: none while nobody asks, and requests wait for the first one. Example: `1`."""
    most: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Replicas at once; while one is replaced, its successor is counted in addition. Example: `4`."""
    slots: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Requests that one replica works on at once. Example: `64`."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least {self.least} is more than most {self.most}; raise most")
        return self


class Target(_Section):
    """When more replicas are started."""

    queue_delay: Delay = 2.0
    """Time that requests wait in the queue. Example: `500ms`."""
    tokens_in_flight: Count | None = None
    """Tokens that one replica works on, reserved ones included; default: only the delay counts. Example: `40000`."""


class Service(_Section):
    """A model under one name, and the jobs (replicas) that answer for it."""

    tenant: TenantName
    """The tenant whose account and limits the replicas' jobs have. Example: `nlp`."""
    user: UserName
    """The Unix user that the replicas run as, a member of the tenant. Example: `nlp-serve`."""
    engine: EngineName
    """What answers: `openai` is any program that speaks OpenAI's protocol, `python` a function of the site; both are
    started with `command`. Example: `vllm`."""
    model: FilePath = ""
    """The model, a file or a folder, on storage that the nodes have. Example: `/models/deepseek-llm-7b-chat`."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Its SHA-256, compared before it is used; docs/serve.md has the one of a folder."""
    stage: FilePath | None = None
    """Folder on the nodes' own disks, into which the model is copied once for each node; default: it is read from where
    it is. Example: `/scratch/models`."""
    broadcast: Mib = 1024
    """What a replica gives a second, at most, of its copy in `stage` to replicas on other nodes, so that the storage is
    read about once when many start; `0`: each reads it. Example: `2G`."""
    options: Annotated[list[Word], Field(max_length=200)] = []
    """Options of the engine, one word each. Example: `[--max-model-len, "8192"]`."""
    command: Annotated[list[Word], Field(max_length=200)] = []
    """The program of the engines `openai` and `python`, one word each; `{socket}`, `{port}`, `{model}` and `{service}`
    are filled in. Example: `[/opt/site/bin/server, --unix, "{socket}"]`."""
    gpus: Annotated[Gpus, Field(ge=1)] | None = None
    """Whole GPUs of a replica, on each of its nodes. Example: `1`."""
    gpu_memory: Annotated[Mib, Field(ge=1)] | None = None
    """A part of one GPU instead. Example: `20G`."""
    gpu_class: Name | None = None
    """Class of the GPUs, of the section `classes`. Example: `h100`."""
    cpus: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """CPUs of a replica, on each of its nodes; default: as other jobs of the tenant. Example: `8`."""
    memory: Annotated[Mib, Field(ge=1)] | None = None
    """Host memory of a replica, on each of its nodes; default: as other jobs of the tenant. Example: `64G`."""
    nodes: Annotated[int, Field(ge=1, le=1000)] = 1
    """Nodes of one replica, for vLLM, SGLang and programs of one's own: docs/serve-engines.md. Example: `2`."""
    partition: Name | None = None
    """Partition of the jobs; default: as other jobs of the tenant. Example: `gpu`."""
    borrow: bool = False
    """The replicas above `least` (all, where the tenant has no guarantee) are over-quota work: they use idle GPUs,
    which are taken back for guaranteed work. The tenant must `borrow`, too."""
    callers: Literal["*"] | list[TenantName] | None = None
    """Tenants whose members may call it; `*`: all. Default: the service's own. Example: `[nlp, robotics]`."""
    replicas: Replicas = Replicas()
    """How many there are."""
    idle: Seconds = 900
    """Time without need of a replica above `least` after which it ends. Example: `10m`."""
    walltime: Annotated[Seconds, Field(ge=60)] = 86_400
    """Time limit of the jobs; each is replaced before its end. Example: `24h`."""
    priority: Priority = "normal"
    """Of its requests, next to those of other services. Example: `high`."""
    first_token_deadline: Annotated[Seconds, Field(ge=1, le=86_400)] = 600
    """Time that a request waits for its first token, if it names none. Example: `2m`."""
    answer_within: Annotated[Seconds, Field(ge=1, le=86_400)] = 3600
    """Time in which a replica must answer a request that does not stream; then the request ends with 504. Example:
    `10m`."""
    default_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Tokens that are reserved for the answer of a request without `max_tokens`. Example: `2048`."""
    ready_within: Annotated[Seconds, Field(ge=1, le=86_400)] = 900
    """Time from the job's start until the model answers; one that takes longer has failed. Example: `20m`."""
    drain_within: Annotated[Seconds, Field(ge=1, le=65_535)] = 600
    """Time that a replica that is replaced has for the requests that it works on. Example: `5m`."""
    health: Annotated[str, Field(pattern=r"^(/[!-~]{0,200})?$")] = ""
    """Path that is asked of the engine to know whether it is well; default: the engine's own. Example: `/health`."""
    target: Target = Target()
    """When more replicas are started."""
    ahead: bool = False
    """Replicas are started ahead of the need that the same time of earlier days had."""
    log_prompts: bool = False
    """Gateways write the prompt of each admitted request into their log, up to 16 KiB of it; users of the service must
    know."""
    logs: FilePath | None = None
    """Folder, on the nodes, that the user may write: the replicas' output; default: it is not kept. Example:
    `/home/nlp-serve/logs`."""
    limits: ServiceLimits = ServiceLimits()
    """What gateways let through of all callers together."""
    paused: bool = False
    """No replicas, and requests are refused: `sluice serve pause`."""

    @field_validator("logs")
    @classmethod
    def _logs(cls, value: str | None) -> str | None:
        if value is not None and ("%" in value or "\\" in value):
            raise ValueError(f"{value[:200]!r}: Slurm fills in what follows '%' or '\\\\'; write a folder without")
        return value

    @field_validator("command")
    @classmethod
    def _command(cls, words: list[str]) -> list[str]:
        for word in words:
            for name in re.findall(r"\{([a-z_]+)\}", word):
                if name not in _FILLED:
                    known = ", ".join(f"{{{one}}}" for one in _FILLED)
                    raise ValueError(f"{word[:80]!r}: {{{name}}} is not filled in; use {known}")
        if words and not words[0].startswith("/"):
            raise ValueError(f"{words[0][:200]!r} is not the absolute path of a program; write it from / on")
        return words

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._program()
        if self.gpus is not None and self.gpu_memory is not None:
            raise ValueError("gpus and gpu_memory are two ways to ask for GPUs; keep one of them")
        if self.gpu_class is not None and self.gpus is None and self.gpu_memory is None:
            raise ValueError(f"gpu_class {self.gpu_class!r} without GPUs; add gpus or gpu_memory")
        if self.nodes > 1 and (self.engine in _ONE_NODE or self.gpu_memory is not None):
            what = "part of one GPU" if self.gpu_memory is not None else f"replica of {self.engine}"
            raise ValueError(f"nodes {self.nodes}: a {what} is on one node; set nodes to 1")
        if self.ready_within + self.drain_within >= self.walltime:
            raise ValueError(
                f"walltime {self.walltime}s is not more than ready_within {self.ready_within}s and drain_within "
                f"{self.drain_within}s together, in which a replica is replaced; raise walltime"
            )
        if self.stage is not None and self.model and (self.model + "/").startswith(self.stage.rstrip("/") + "/"):
            raise ValueError(f"stage {self.stage!r} has the model itself in it; name another folder")
        if isinstance(self.callers, list) and not self.callers:
            raise ValueError("callers is empty, so that nobody could call it; name tenants, or pause the service")
        return self

    def _program(self) -> None:
        if self.engine in _OWN_COMMAND:
            if not self.command:
                raise ValueError(f"engine {self.engine} needs the command that starts it; add command")
            if self.options:
                raise ValueError(f"engine {self.engine} has no options of its own; write them into command")
            return
        if self.command:
            raise ValueError(f"command is for the engines {' and '.join(_OWN_COMMAND)}; use options")
        if not self.model:
            raise ValueError(f"engine {self.engine} needs a model; add model: /PATH")
        for word in self.options:
            if taken := taken_option(self.engine, word):
                raise ValueError(f"options: {word[:80]!r} sets {taken}, which a replica sets itself; take it out")

    @property
    def whose(self) -> tuple[str, ...]:
        """Tenants that may call it; `*`: all."""
        if self.callers is None:
            return (self.tenant,)
        return ("*",) if self.callers == "*" else tuple(self.callers)


def taken_option(engine: str, word: str) -> str | None:
    """Which option that a replica sets itself this word would set: engines take abbreviations and `_` for `-`."""
    if not word.startswith("-"):
        return None
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return next((one for one in TAKEN[engine] if one == name), None)
    name = name.replace("_", "-")
    return next((one for one in TAKEN[engine] if one == name or (len(name) > 3 and one.startswith(name))), None)


class Batches(_Section):
    """`/v1/files` and `/v1/batches` of gateways: files of requests that jobs of their callers answer."""

    gateways: Annotated[list[str], Field(min_length=1, max_length=8)]
    """Where the jobs reach gateways; one that does not answer is passed over. Example: `[https://models.site.org]`."""
    ca: FilePath | None = None
    """Certificates, on the nodes, that the jobs trust for these; default: the nodes' own. Example:
    `/etc/ssl/site-ca.pem`."""
    api: str = "http://127.0.0.1:6823"
    """`sluice web`, where gateways submit the jobs, each with its caller's own token."""
    api_ca: FilePath | None = None
    """Certificates that gateways trust for it; default: the host's own."""
    folder: FilePath = str(FILES)
    """Folder of the files, of the gateways' user alone; one that all gateways share. Example:
    `/shared/sluice-gateway/files`."""
    quota: Annotated[Mib, Field(ge=1)] = 100 << 10
    """Space for the files of one tenant, its batches' answers included. Example: `500G`."""
    keep: Annotated[Seconds, Field(ge=3600)] = 30 * 86_400
    """Time after which files, and batches that are over, are removed. Example: `14d`."""
    nice: Annotated[int, Field(ge=0, le=2_147_483_645)] = 10_000
    """By how much the jobs' priority is lowered. Example: `100000`."""
    program: FilePath = str(PROGRAM)
    """sluice-batch, where nodes have it."""

    @field_validator("gateways", "api")
    @classmethod
    def _urls(cls, value: list[str] | str) -> list[str] | str:
        for one in [value] if isinstance(value, str) else value:
            match = _URL.fullmatch(one)
            if match is None:
                raise ValueError(f"{one[:80]!r} is not an address of a server; write it as https://HOST:PORT")
            if match[1] == "http" and not _THIS_HOST.fullmatch(match[2]):
                raise ValueError(f"{one[:80]!r} would send secrets without encryption; write https://")
        return value

    @field_validator("program")
    @classmethod
    def _program(cls, value: str) -> str:
        if not _PLAIN_PATH.fullmatch(value):
            raise ValueError(f"{value[:80]!r} becomes a word of a script; write letters, digits and `_.+-` only")
        return value


class Serving(_Section):
    """What all services share: limits of those who call, and where things are."""

    registries: Annotated[list[str], Field(max_length=8)] = []
    """HOST:PORT of each `sluice replicad`, as nodes reach it; default: the controllers of slurm.conf, port 6824.
    Example: `[ctl-1:6824, ctl-2:6824]`."""
    requests: FilePath = str(FOLDER)
    """Folder of the records of requests, the `--records` of gateways, for budgets and reports; one that all controllers
    share where several have gateways."""
    address: Annotated[
        str, Field(pattern=r"^(https?://[A-Za-z0-9\[][A-Za-z0-9.:\]-]{0,252}(/[A-Za-z0-9._~/-]{0,200})?)?$")
    ] = ""
    """Where users reach the gateways, as clients have it; it is shown to those who may call. Example:
    `https://models.site.org/v1`."""
    without_authority: WithoutAuthority = "share"
    """What a gateway does with limits while no controller answers for them: `share`: it goes on with its share, the
    limit divided by the number of gateways that there were; `refuse`: what has limits waits, and is refused then."""
    parts_network: Literal["trusted"] | None = None
    """Whether the network between nodes may have what engines on several nodes say to each other, which Sluice does not
    encrypt: `trusted` where nobody else can read it or write to it. Without it no service has `nodes` above 1."""
    data_path: DataPath = "auto"
    """How replicas give each other staged models: `auto`: over UCX where both of them have RDMA, else over TCP; `tcp`:
    never over UCX; `ucx`: over UCX wherever it is installed, also without RDMA. What fails over UCX goes over TCP."""
    batches: Batches | None = None
    """Files and batches of OpenAI's API; default: there are none."""
    each_key: ServiceLimits = ServiceLimits()
    """For each key that has no line in `keys`."""
    each_user: ServiceLimits = ServiceLimits()
    """For each user that has no line in `users`, over all of its keys."""
    each_tenant: ServiceLimits = ServiceLimits()
    """For each tenant that has no line in `tenants`, over all of its users."""
    keys: Annotated[dict[str, ServiceLimits], Field(max_length=10_000)] = {}
    """Single keys by their ids. Example: `{0123456789abcdef: {concurrent: 4}}`."""
    users: Annotated[dict[UserName, ServiceLimits], Field(max_length=100_000)] = {}
    """Single users. Example: `{alice: {requests_per_minute: 60}}`."""
    tenants: Annotated[dict[TenantName, TenantServing], Field(max_length=10_000)] = {}
    """Single tenants. Example: `{nlp: {weight: 3, tokens: 500000000}}`."""

    @field_validator("registries")
    @classmethod
    def _registries(cls, value: list[str]) -> list[str]:
        for one in value:
            match = _HOST_PORT.fullmatch(one)
            if match is None or not 0 < int(match[1]) < 65536:
                raise ValueError(f"{one[:80]!r} is not HOST:PORT; write it as e.g. ctl-1:6824")
        if len(set(value)) != len(value):
            raise ValueError("a registry is named twice; name it once")
        return value

    @field_validator("keys")
    @classmethod
    def _keys(cls, value: dict[str, ServiceLimits]) -> dict[str, ServiceLimits]:
        for one in value:
            if not _KEY.fullmatch(one):
                raise ValueError(f"{one[:40]!r} is not the id of a key; see: sluice token list")
        return value
