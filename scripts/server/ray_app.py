"""The server as a Ray Serve application: one app that clients reach, engines behind it.

`serve run paged_trt.scripts.server.ray_app:build engine_dir=PATH replicas=2` starts it; Ray places
the replicas on GPUs and hosts, watches and replaces them, and routes requests.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import pydantic
from ray import serve
from starlette.types import ASGIApp

from paged_trt.plugins.errors import ConfigError, ExecutionError, UnsupportedError
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.results import SessionStats
from paged_trt.runtime.template_process import DEFAULT_SECONDS
from paged_trt.scripts.prompts import require_tokenizer
from paged_trt.scripts.server.app import DEFAULT_MAX_BODY_BYTES, make_app
from paged_trt.scripts.server.failures import ApiError
from paged_trt.scripts.server.listen import read_key
from paged_trt.scripts.server.pieces import Piece, Started
from paged_trt.scripts.server.protocol import AnyRequest, CompletionRequest
from paged_trt.scripts.server.ray_metrics import RayMetrics
from paged_trt.scripts.server.service import DEFAULT_MAX_WAITING, LocalService

PREFIX_ROUTERS: Final = (
    "ray.serve.llm.request_router:PrefixCacheAffinityRouter",
    # What the first one is a name of; that module asks for vLLM or SGLang to be installed.
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ":PrefixCacheAffinityRouter",
)
"""Ray's own router, which sends a prompt where others with its beginning went."""
_ROUTER_OPTIONS: Final = {
    # Difference of queue lengths from which a short queue counts for more than a prefix.
    "imbalanced_threshold": 8,
    "do_eviction": True,
}


METRICS_ARE_RAYS: Final = (
    "the engines run in replicas, which tell Ray their metrics: scrape each host's metrics port "
    "(`ray start --metrics-export-port PORT`) for `ray_paged_trt_*`, or let Prometheus find all "
    "hosts in Ray's prom_metrics_service_discovery.json"
)


class RaySettings(pydantic.BaseModel):
    """Arguments of `serve run`.

    Attributes:
        engine_dir: what `paged-trt build` wrote, at the same place on every host.
        model_name: name that clients give; the directory's when left out.
        executor: as of `paged-trt serve`.
        replicas: engines.
        gpus_per_replica: 1 for an engine on a GPU of its own; 0 for the reference executor.
        prefix_aware: route by prefixes; otherwise by the length of queues alone.
        api_key_file: as of `paged-trt serve`, read where the app runs.
        api_key_env: as of `paged-trt serve`.
        max_waiting: requests that may wait in each replica.
        max_body_bytes: longest request body.
        template_seconds: time that the chat template may take for one conversation.
        drain_seconds: time that a replica's requests have to end when Ray stops it.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    engine_dir: Path
    model_name: str | None = None
    executor: str = "auto"
    replicas: int = pydantic.Field(default=1, ge=1)
    gpus_per_replica: float = pydantic.Field(default=1.0, ge=0)
    prefix_aware: bool = True
    api_key_file: Path | None = None
    api_key_env: str | None = None
    max_waiting: int = pydantic.Field(default=DEFAULT_MAX_WAITING, ge=1)
    max_body_bytes: int = pydantic.Field(default=DEFAULT_MAX_BODY_BYTES, ge=1)
    template_seconds: float = pydantic.Field(default=DEFAULT_SECONDS, gt=0)
    drain_seconds: float = pydantic.Field(default=30.0, ge=0)

    @property
    def name(self) -> str:
        """Name that clients give."""
        return self.engine_dir.resolve().name if self.model_name is None else self.model_name


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """A request as it travels to an engine.

    Attributes:
        prompt: text that Ray's router compares with others; not empty.
        request: the request.
    """

    prompt: str
    request: AnyRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An `ApiError` as it travels back: Ray would wrap one that is raised."""

    status: int
    message: str
    kind: str
    param: str | None
    code: str | None


class Engine:
    """A replica: one engine, and the tokenizer with it."""

    def __init__(self, settings: RaySettings) -> None:
        tokenizer = require_tokenizer(settings.engine_dir)
        executor = load_engine(settings.engine_dir, settings.executor)
        executor.warm_up()
        self._drain_seconds = settings.drain_seconds
        self._service = LocalService(
            executor,
            tokenizer,
            model_name=settings.name,
            max_waiting=settings.max_waiting,
            template_seconds=settings.template_seconds,
        )
        self._metrics = RayMetrics(self._service.metric_registry)

    async def answer(self, routed: Routed) -> AsyncGenerator[Started | Piece | Failure, None]:
        """As `Service.answer`, with an error as the last item."""
        items = self._service.answer(routed.request)
        try:
            async for item in items:
                yield item
        except ApiError as error:
            yield Failure(error.status, str(error), error.kind, error.param, error.code)
        finally:
            await items.aclose()

    async def stats(self) -> SessionStats:
        """Pages and counts of this replica."""
        return self._service.session.stats()

    async def check_health(self) -> None:
        """Ray calls it every few seconds, and replaces a replica for which it raises."""
        self._metrics.publish()
        if not self._service.is_healthy:
            raise ExecutionError("the engine failed for the last requests")

    async def __del__(self) -> None:
        """Ray calls it before it ends the replica."""
        await self._service.aclose(seconds=self._drain_seconds)


class RayService:
    """A `Service` whose engines are the replicas of a deployment.

    Args:
        engines: Ray's handle of the deployment.
        model_name: name of the one model.
    """

    def __init__(self, engines: Any, *, model_name: str) -> None:
        self._engines = engines.options(stream=True)
        self.model_name = model_name
        self.is_healthy = True

    async def answer(self, request: AnyRequest) -> AsyncGenerator[Started | Piece, None]:
        """`Started` once an engine took the request, then pieces up to the finish reason.

        Raises:
            ApiError: the request cannot be answered, or not to its end.
        """
        response = self._engines.answer.remote(Routed(_routing_text(request), request))
        try:
            async for item in response:
                if isinstance(item, Failure):
                    raise ApiError(
                        item.status,
                        item.message,
                        kind=item.kind,
                        param=item.param,
                        code=item.code,
                    )
                yield item
        finally:
            response.cancel()

    def metrics(self) -> tuple[bytes, str]:
        """Nothing is here: each replica tells Ray its own.

        Raises:
            ApiError: where the metrics are.
        """
        raise ApiError(404, METRICS_ARE_RAYS)

    async def aclose(self, *, seconds: float) -> None:
        """Nothing to do: Ray ends the engines."""


class Ingress:
    """The app that clients reach; its key is read where it runs."""

    def __init__(self, engines: Any, settings: RaySettings) -> None:
        self._service = RayService(engines, model_name=settings.name)
        self._key = read_key(file=settings.api_key_file, variable=settings.api_key_env)
        self._max_body_bytes = settings.max_body_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray calls it once the replica is there."""
        return make_app(self._service, key=self._key, max_body_bytes=self._max_body_bytes)


def build(arguments: dict[str, Any]) -> Any:
    """The application, for `serve run`.

    Args:
        arguments: fields of `RaySettings`.

    Raises:
        ConfigError: an argument is unknown or has a value that cannot work.
        UnsupportedError: Ray's prefix-aware router cannot be imported.
    """
    try:
        settings = RaySettings.model_validate(arguments)
    except pydantic.ValidationError as error:
        raise ConfigError(f"the arguments of the application are not valid: {error}") from error
    routing: dict[str, Any] = {}
    if settings.prefix_aware:
        routing = {
            "request_router_class": prefix_router(),
            "request_router_kwargs": _ROUTER_OPTIONS,
        }
    engines = serve.deployment(Engine).options(
        name="engine",
        num_replicas=settings.replicas,
        ray_actor_options={"num_gpus": settings.gpus_per_replica},
        # The engine queues by itself, and refuses with 429.
        max_ongoing_requests=settings.max_waiting + 1024,
        graceful_shutdown_timeout_s=settings.drain_seconds + 10,
        request_router_config=serve.config.RequestRouterConfig(**routing),
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        # It passes texts on: no engine shall wait for a core that it holds.
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=settings.replicas * (settings.max_waiting + 1024),
    )
    return ingress.bind(engines.bind(settings), settings)


def prefix_router() -> str:
    """Import path of Ray's prefix-aware router.

    Raises:
        UnsupportedError: this version of Ray has none that can be imported here.
    """
    problems = []
    for path in PREFIX_ROUTERS:
        module, _, name = path.partition(":")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{module}: {error}")
        else:
            return f"{module}:{name}"
    raise UnsupportedError(
        f"Ray's prefix-aware router cannot be imported ({'; '.join(problems)}); install what it "
        "names, or pass `prefix_aware=false` to route by the length of queues"
    )


def _routing_text(request: AnyRequest) -> str:
    if not isinstance(request, CompletionRequest):
        messages = (message.for_template() for message in request.messages)
        return "\n".join(f"{each['role']}: {each['content']}" for each in messages)
    if isinstance(request.prompt, str):
        return request.prompt or " "
    return " ".join(map(str, request.prompt)) or " "
