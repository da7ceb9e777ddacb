"""All settings of the gateway. Each can be set as `STROP_<NAME>` or in `strop.toml`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from gateway.backends.launch import VllmOptions
from gateway.backends.providers import Provider
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.settings import StoreSettings
from gateway.tracing.settings import LangfuseSettings
from gateway.webhook_settings import Webhook


class PolicyConfig(PolicySettings):
    """A policy that exists from the start: `[policies.NAME]`."""

    model_config = ConfigDict(extra="forbid")

    lora: Lora = Field(default_factory=Lora)

    def settings(self) -> PolicySettings:
        """What the store keeps as the policy's settings."""
        return PolicySettings(**self.model_dump(exclude={"lora"}))


class Settings(StoreSettings):
    """The gateway's settings."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on."""

    workers: int = Field(default=1, ge=1, le=256)
    """Processes that answer on the port; one of them publishes."""

    writer: Literal["auto", "thread", "process"] = "auto"
    """Where completions and rewards are committed: in a process that all workers share, or in a
    thread of each. `auto` is the thread on PostgreSQL and the process for two workers or more on
    SQLite; with one it is the thread while requests come one by one, and the process, which is
    started when it is needed first, while several are in progress."""

    admin_key: str = Field(default="", repr=False)
    """A key that may do everything in the project `default`, for a start where nobody can run
    `strop keys create`. While neither this nor any other key exists, strop answers only its own
    machine."""

    base_model: str = ""
    """Folder or hub name of the base model. Empty: the small model that comes with strop."""

    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Policies that exist from the start. None: one, named `agent`."""

    replicas: list[str] = Field(default_factory=list)
    """URLs of vLLM servers; `dns+http://vllm:8000` stands for every address behind the name.
    Empty: `strop up` starts one."""

    replica_dns_seconds: float = Field(default=5.0, gt=0)
    """Seconds after which names of replicas are looked up again."""

    providers: dict[str, Provider] = Field(default_factory=dict)
    """Models of other providers, by the name that clients use: `[providers.NAME]`."""

    preload_litellm: bool = True
    """Import LiteLLM in the background, soon after the start: else the first request for Responses,
    Messages or a provider waits for that, which takes seconds. It needs about 150 MB of memory in
    each process. With `providers` it is always done."""

    webhooks: dict[str, Webhook] = Field(default_factory=dict)
    """Addresses that are told when a version is published, fails or is rolled back:
    `[webhooks.NAME]`."""

    request_log: bool = True
    """Write one line for each request to the standard error: never a prompt, an answer or a key."""

    log_format: Literal["text", "json"] = "text"
    """Of that line, and of all others: for people, or one JSON object a line."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of strop's own log."""

    otel: bool = False
    """Send a span for each request by OTLP. OpenTelemetry's own variables say where to, such as
    `OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318`."""

    vllm: VllmOptions = Field(default_factory=VllmOptions)
    """The vLLM that `strop up` starts."""

    langfuse: LangfuseSettings = Field(default_factory=LangfuseSettings)
    """Traces to Langfuse, and scores from there."""

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Largest request body that is read."""

    max_requests: int = Field(default=1024, ge=1)
    """Completions that one process answers at once; further ones are refused with 429, and clients
    try again. Each holds its body and its answer in memory."""

    max_choices: int = Field(default=128, ge=1)
    """Largest `n`: choices of one completion, or of each prompt of a text completion. vLLM samples
    them all at once, and their tokens stay in memory until they are logged."""

    upstream_timeout: float = Field(default=600.0, gt=0)
    """Seconds that vLLM may take for one answer, or between two chunks of it."""

    keep_alive: int = Field(default=75, ge=1)
    """Seconds that a client's connection may be idle. Whoever hangs up first must be the client:
    a request that it sends while strop closes is lost, and few clients send it again. Clients and
    load balancers wait for up to 60 s."""

    connect_timeout: float = Field(default=5.0, gt=0)
    """Seconds that a connection to vLLM may take."""

    publish_poll: float = Field(default=0.5, gt=0)
    """Seconds between two looks of the publisher."""

    guard_poll: float = Field(default=5.0, gt=0)
    """Seconds between two looks at what the versions earn."""

    retention_days: float | None = Field(default=None, gt=0)
    """Days after its last completion or reward at which a trajectory is deleted. None: never. A
    project with a rule of its own (`PUT /v1/retention`) has that instead."""

    project_retention_days: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """The same for single projects, which have it instead: `[project_retention_days]`. A rule of
    their own goes before this too."""

    judge_poll: float = Field(default=2.0, gt=0)
    """Seconds between two looks for groups that a judge is to rank."""

    keep_loaded: int = Field(default=2, ge=0)
    """Earlier versions that stay loaded behind the alias, for trajectories that began with them."""

    probe_tolerance: float = Field(default=0.05, gt=0)
    """Mean absolute difference, in nats, between a replica's and the trainer's logprobs of a
    version's probe at which the version is still published. Measured: 1e-5 when both compute in
    float32, 0.04 with bfloat16 on one side."""

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        model = self.base_model
        looks_like_path = model.startswith(("/", "./", "../", "~"))
        if looks_like_path and not (Path(model).expanduser() / "config.json").is_file():
            raise ValueError(
                f"base_model {model!r} is not a model folder: there is no config.json in it. Give "
                "the path of one, or the name of a model on the hub"
            )
        limit = self.vllm.max_lora_rank
        for name, config in self.policies.items():
            if limit is not None and config.lora.rank > limit:
                raise ValueError(
                    f"the policy {name!r} has LoRA rank {config.lora.rank}, vLLM's "
                    f"--max-lora-rank is {limit}. Lower policies.{name}.lora.rank or raise "
                    "vllm.max_lora_rank"
                )
        return self

    def policy_configs(self) -> dict[str, PolicyConfig]:
        """The policies that exist from the start."""
        return self.policies or {"agent": PolicyConfig()}

    def public_url(self) -> str:
        """The address of strop's pages, for links to them."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return (self.langfuse.public_url or f"http://{host}:{self.port}").rstrip("/")

    def bundled_model(self) -> Path:
        """Where the small model that comes with strop is unpacked."""
        return (self.data_dir / "models" / "smollm2-135m").absolute()

    def model(self) -> str:
        """The base model, with the default filled in; a folder by its absolute path."""
        model = self.base_model or self.vllm.model or str(self.bundled_model())
        folder = Path(model).expanduser()
        return str(folder.absolute()) if folder.is_dir() else model
