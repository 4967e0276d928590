"""Sidecar JSON of an engine directory: what a plan is, checked before anything reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pydantic

from paged_trt.plugins.engine_table import EngineTable
from paged_trt.plugins.errors import ManifestError, SpecMismatchError
from paged_trt.plugins.fields import ABI_VERSION
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.plugins.path_hints import not_an_engine
from paged_trt.plugins.tensors import EngineSpec, TensorSpec
from paged_trt.plugins.version import version

SCHEMA: Final = 3
"""Raised when a field of the spec is added: an older manifest says nothing of it."""
MANIFEST_FILE: Final = "manifest.json"
PLAN_FILE: Final = "model.plan"
MODEL_FILE: Final = "model.onnx"
MODEL_DATA_FILE: Final = "model.onnx.data"
KV_SCALES_FILE: Final = "kv_scales.safetensors"
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
"""Files beside a model that encode and decode its text and name its end token."""
ENGINE_FILES: Final = (
    MODEL_FILE,
    MODEL_DATA_FILE,
    PLAN_FILE,
    KV_SCALES_FILE,
    MANIFEST_FILE,
    *TOKENIZER_FILES,
)
"""Every file that an engine directory may hold."""
MAX_MANIFEST_BYTES: Final = 16 * 2**20
_EDITED: Final = "the file is truncated or was edited: rebuild with `paged-trt build`"

Sha256 = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Capability = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}\+?$")]
"""A compute capability such as `9.0`; `8.0+` is that one and later ones."""
FileName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")]


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")


class FileRecord(_Record):
    """Size in bytes and SHA-256 of one file of the engine directory."""

    sha256: Sha256
    size: Annotated[int, pydantic.Field(ge=0)]


class PoolRecord(_Record):
    """Page geometry; the derived numbers are written for readers and checked."""

    num_pages: int
    max_batch_size: int
    max_kv_cache_capacity: int
    max_pages_per_seq: int
    tokens_per_page: Literal[128]


class BuildRecord(_Record):
    """What built the plan, and what it needs to run."""

    flavor: Literal["tensorrt", "tensorrt_rtx"]
    tensorrt_version: str
    route: Literal["plugin", "gqa"]
    abi_version: int
    kernel_source_sha256: Sha256
    compute_capabilities: tuple[Capability, ...]
    attention_plan: str | None
    float32_sums: bool = True


class SourceRecord(_Record):
    """The model that the engine was made from: information, not a gate."""

    name: str
    sha256: Sha256
    dialect: str


class EngineManifest(_Record):
    """Everything that the runtime must know before it opens a plan."""

    schema_version: Literal[3]
    created_by: str
    pool: PoolRecord
    spec: EngineSpec
    geometry_sha256: Sha256
    tensors: tuple[TensorSpec, ...]
    engine: EngineTable
    build: BuildRecord
    source: SourceRecord
    files: dict[FileName, FileRecord]

    @classmethod
    def create(
        cls,
        *,
        spec: EngineSpec,
        engine: EngineTable,
        build: BuildRecord,
        source: SourceRecord,
        files: dict[str, FileRecord],
    ) -> EngineManifest:
        """Manifest of an engine that was just built.

        Args:
            spec: what the engine was built for.
            engine: what TensorRT reported of it.
            build: how it was built.
            source: what it was built from.
            files: every other file of the engine directory.
        """
        pool = PoolRecord(
            num_pages=spec.pool.num_pages,
            max_batch_size=spec.pool.max_batch_size,
            max_kv_cache_capacity=spec.pool.max_kv_cache_capacity,
            max_pages_per_seq=spec.pool.max_pages_per_seq,
            tokens_per_page=TOKENS_PER_PAGE,
        )
        return cls(
            schema_version=SCHEMA,
            created_by=f"paged-trt {version()}",
            pool=pool,
            spec=spec,
            geometry_sha256=geometry_sha256(spec),
            tensors=spec.tensors(),
            engine=engine,
            build=build,
            source=source,
            files=files,
        )

    def to_json(self) -> str:
        """JSON text with two-space indent and a final newline."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    def check(self, *, where: str) -> None:
        """Compare the written geometry with what the spec gives.

        Raises:
            SpecMismatchError: two of the records disagree.
        """
        pool = self.spec.pool
        for name in ("num_pages", "max_batch_size", "max_kv_cache_capacity", "max_pages_per_seq"):
            _require_equal(f"pool.{name}", getattr(pool, name), getattr(self.pool, name), where)
        _require_equal("build.abi_version", ABI_VERSION, self.build.abi_version, where)
        _require_equal_tensors(self.spec.tensors(), self.tensors, where)
        _require_equal("geometry_sha256", geometry_sha256(self.spec), self.geometry_sha256, where)


def _require_equal(field: str, left: object, right: object, where: str) -> None:
    if left != right:
        raise SpecMismatchError(field, left, right, where=where)


def _require_equal_tensors(
    left: tuple[TensorSpec, ...], right: tuple[TensorSpec, ...], where: str
) -> None:
    for mine, theirs in zip(left, right, strict=False):
        found = _TENSORS_ADAPTER.dump_python(theirs, mode="json")
        for part, value in _TENSORS_ADAPTER.dump_python(mine, mode="json").items():
            _require_equal(f"tensors.{mine.name}.{part}", value, found[part], where)
    _require_equal("tensors", f"{len(left)} entries", f"{len(right)} entries", where)


_SPEC_ADAPTER: Final = pydantic.TypeAdapter(EngineSpec)
_TENSORS_ADAPTER: Final = pydantic.TypeAdapter(TensorSpec)


def geometry_sha256(spec: EngineSpec) -> str:
    """SHA-256 of the spec's canonical JSON; ties a plan to its manifest."""
    data = _SPEC_ADAPTER.dump_python(spec, mode="json")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def network_name(spec: EngineSpec) -> str:
    """Name that the plan carries and gives back when it is loaded."""
    return f"paged-trt/{SCHEMA} pages={spec.pool.num_pages} sha256={geometry_sha256(spec)}"


def file_record(path: Path) -> FileRecord:
    """Hash and size of a file.

    Raises:
        ManifestError: the file cannot be read, or is no regular file.
    """
    _require_regular(path)
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            size = stream.tell()
    except OSError as error:
        raise _unreadable(path, error) from error
    return FileRecord(sha256=digest, size=size)


def _unreadable(path: Path, error: OSError) -> ManifestError:
    remedy = (
        "change its permissions"
        if isinstance(error, PermissionError)
        else "rebuild the engine with `paged-trt build`"
    )
    return ManifestError(f"cannot read {path}: {error.strerror}; {remedy}")


def _require_regular(path: Path) -> None:
    # A pipe or a device would be read for ever.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ManifestError(f"{path} is no regular file; rebuild the engine with `paged-trt build`")


def check_file(directory: Path, name: str, record: FileRecord) -> None:
    """Compare one file of an engine directory with its record.

    Raises:
        ManifestError: the file is missing, truncated or another one.
    """
    path = directory / name
    _require_record(path, record, file_record(path))


def read_checked(directory: Path, name: str, record: FileRecord) -> bytes:
    """Contents of one file of an engine directory: the very bytes that were hashed.

    Raises:
        ManifestError: the file is missing, truncated or another one.
    """
    path = directory / name
    _require_regular(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    found = FileRecord(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    _require_record(path, record, found)
    return data


def _require_record(path: Path, record: FileRecord, found: FileRecord) -> None:
    for field in ("size", "sha256"):
        want, have = getattr(record, field), getattr(found, field)
        if want != have:
            raise ManifestError(
                f"{path}: the manifest says {field} {want}, found {have}; the file is truncated "
                "or belongs to another engine: rebuild with `paged-trt build`"
            )


def read_manifest(directory: Path) -> EngineManifest:
    """Parse and check `manifest.json`; no other file is opened.

    Args:
        directory: an engine directory.

    Raises:
        ManifestError: the manifest is missing, truncated, of another schema or not valid.
        SpecMismatchError: its parts disagree with each other.
    """
    path = directory / MANIFEST_FILE
    data = _read_json(path)
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA:
        found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
        raise ManifestError(
            f"{path}: manifest schema must be {SCHEMA}, found {found!r}; "
            "rebuild with `paged-trt build`"
        )
    try:
        manifest = EngineManifest.model_validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        raise ManifestError(
            f"{path} is no valid manifest: {_first_error(error)}; {_EDITED}"
        ) from error
    if manifest.model_dump(mode="json") != data:
        raise ManifestError(f"{path} holds unknown or reformatted entries; {_EDITED}")
    manifest.check(where=str(path))
    return manifest


def check_files(
    directory: Path, manifest: EngineManifest, *, names: Collection[str] | None = None
) -> None:
    """Compare the files of an engine directory with the manifest.

    Args:
        directory: an engine directory.
        manifest: its manifest.
        names: files that are going to be read; None for all of them.

    Raises:
        ManifestError: a file is missing, truncated or another one, or the manifest leaves out
            the plan or a file that would be read.
    """
    if PLAN_FILE not in manifest.files:
        raise ManifestError(
            f"{directory / MANIFEST_FILE} lists no {PLAN_FILE}; rebuild with `paged-trt build`"
        )
    # What no hash covers is not read.
    for name in ENGINE_FILES if names is None else names:
        if name != MANIFEST_FILE and name not in manifest.files and (directory / name).exists():
            raise ManifestError(
                f"{directory / name} is not listed in {MANIFEST_FILE}; remove it, or rebuild with "
                "it beside the model"
            )
    for name, record in manifest.files.items():
        if names is None or name in names:
            check_file(directory, name, record)


def _read_json(path: Path) -> Any:
    _require_regular(path)
    try:
        size = path.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise ManifestError(
                f"{path} has {size} bytes, over the limit of {MAX_MANIFEST_BYTES}; {_EDITED}"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ManifestError(not_an_engine(path.parent)) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is no JSON ({error}); {_EDITED}") from error


def _first_error(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"`{place}`: {first['msg']}"
