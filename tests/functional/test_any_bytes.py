"""Any bytes in, only a BridgeError out, in bounded time and memory: properties, and what they and the fuzzer found."""

from __future__ import annotations

import json
import os
import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoints
import fault_models
import fuzz_targets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge import run_spec
from bridge.converters import hf_store
from bridge.errors import BridgeError, CheckpointError, SpecError, printable
from bridge.model_spec import ModelSpec, read_json

NAMES = ["safetensors", "index", "config", "tokenizer", "tokenizer_config", "generation", "adapter"]
NAMES += ["adapter_weights", "sidecar", "metadata", "array", "spec"]
EXAMPLES = int(os.environ.get("BRIDGE_EXAMPLES", "40"))
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=5000,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def test_every_kind_of_file_is_tried_and_read_when_it_is_whole() -> None:
    assert sorted(fuzz_targets.targets()) == sorted(NAMES)
    for name, target in fuzz_targets.targets().items():
        assert target.read(target.seed), name


def test_a_reader_that_lets_an_error_out_is_found() -> None:
    """The property could fail: a reader without its checks is caught by the same inputs."""
    loose = fuzz_targets.Target(b'{"a": [1, 2]}', lambda data: json.loads(data)["a"][1])
    assert loose.read(loose.seed)
    with pytest.raises(KeyError):
        loose.read(b"{}")


@pytest.mark.parametrize("name", NAMES)
@BOUNDED
@given(data=st.data())
def test_a_valid_file_with_something_unpleasant_in_it(name: str, data: st.DataObject) -> None:
    target = fuzz_targets.targets()[name]
    value, rest = target.parts()
    for _ in range(data.draw(st.integers(1, 3))):
        value = fuzz_targets.nasty(value, lambda below: data.draw(st.integers(0, below - 1)))
    target.read(target.encode(value, rest))


@pytest.mark.parametrize("name", NAMES)
@BOUNDED
@given(data=st.data())
def test_bytes_that_were_cut_changed_or_made_up(name: str, data: st.DataObject) -> None:
    target = fuzz_targets.targets()[name]
    seed = target.seed[:4000]
    start = data.draw(st.integers(0, len(seed)))
    stop = data.draw(st.integers(start, min(len(seed), start + 64)))
    target.read(seed[:start] + data.draw(st.binary(max_size=64)) + seed[stop:])


@contextmanager
def bounded(megabytes: int = 400, seconds: float = 10.0) -> Iterator[None]:
    """Fail if a block takes long, or asks for more memory than this."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), old[1]))
    start = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
    assert time.monotonic() - start < seconds


@pytest.mark.parametrize("length", [2**60, 2**63 - 1, 2**64 - 1, 100_000_001, 10_000])
def test_a_header_that_claims_to_be_huge_is_not_allocated(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    fault_models.write_safetensors(path, b"{}", b"\0" * 100, length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"header of {length} in 110 bytes"), bounded():
        hf_store.read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


HUGE = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**62]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": HUGE}, "impossible"),
        ({"a": {**HUGE, "shape": [2**31] * 200_000}}, "impossible"),
        ({"a": {**HUGE, "shape": [10**4000] * 500}}, "impossible"),
        ({"a": {**HUGE, "shape": [0] * 10_000, "data_offsets": [0, 0]}}, "impossible"),
        ({"a": {**HUGE, "shape": [-4], "data_offsets": [0, -16]}}, "impossible"),
        ({"a": {**HUGE, "shape": [True], "data_offsets": [0, 4]}}, "impossible"),
        ({"a": {**HUGE, "shape": "44", "data_offsets": [0, 4]}}, "impossible"),
        ({"a": {**HUGE, "shape": [1.0], "data_offsets": [0, 4]}}, "impossible"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "impossible"),
        ({"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}, "has dtype X9, which is not known here"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "which is not known here"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "the entry of a is damaged"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, "the entry of a is damaged"),
        ({"a": 5}, "the entry of a is damaged"),
        ([], "not a JSON object"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a": 1, "a": 2}', "a name appears twice"),
        (b"\xff\xfe{", "no JSON"),
    ],
)
def test_a_header_that_lies(header: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    fault_models.write_safetensors(path, header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=says) as found, bounded():
        hf_store.read_header(path)
    assert "model.safetensors" in str(found.value)
    assert len(str(found.value)) < 5000


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([[0, 8], [4, 12]], "b starts at byte 4 of the data, 8 was expected"),
        ([[0, 8], [0, 8]], "starts at byte 0 of the data, 8 was expected"),
        ([[4, 12], [12, 20]], "a starts at byte 4 of the data, 0 was expected"),
        ([[0, 8], [12, 20]], "b starts at byte 12 of the data, 8 was expected"),
        ([[0, 8], [8, 16]], "bytes too many"),
    ],
)
def test_ranges_that_overlap_or_leave_a_gap(offsets: list[list[int]], says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": place} for name, place in zip("ab", offsets, strict=True)
    }
    fault_models.write_safetensors(path, header, bytes(20))
    with pytest.raises(CheckpointError, match=says):
        hf_store.read_header(path)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("../secret.safetensors", "is not a plain file name"),
        ("/etc/passwd", "is not a plain file name"),
        ("sub/model.safetensors", "is not a plain file name"),
        ("..\\secret.safetensors", "is not a plain file name"),
        ("..", "is not a plain file name"),
        ("", "is not a plain file name"),
        ("x" * 300, "is not a plain file name"),
        ("link.safetensors", "is a link that leaves the folder"),
        ("nowhere.safetensors", "nowhere.safetensors is missing"),
        ("folder.safetensors", "folder.safetensors is missing"),
        (5, "weight_map must map"),
    ],
)
def test_an_index_that_points_elsewhere(file: Any, says: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", shards=2)
    (hf / "model-00001-of-00002.safetensors").rename(tmp_path / "secret.safetensors")
    (hf / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (hf / "folder.safetensors").mkdir()
    index = hf / "model.safetensors.index.json"
    text = index.read_text().replace('"model-00001-of-00002.safetensors"', json.dumps(file))
    index.write_text(text)
    with pytest.raises(CheckpointError, match=says):
        checkpoints.convert(hf, tmp_path / "ck")


def test_a_tensor_in_two_files_and_a_name_twice_in_the_index(tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf", shards=2)
    index = hf / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    name = next(name for name, file in values["weight_map"].items() if file.startswith("model-00002"))
    text = index.read_text()
    index.write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "model-00001-of-00002.safetensors",'))
    with pytest.raises(CheckpointError, match="a name appears twice"):
        checkpoints.convert(hf, tmp_path / "ck")
    index.write_text(text)
    first = hf / "model-00001-of-00002.safetensors"
    header, data = fault_models.read_safetensors(first)
    header[name] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    fault_models.write_safetensors(first, header, data)
    with pytest.raises(CheckpointError, match=f"{name} is (in both|not in the index)"):
        checkpoints.convert(hf, tmp_path / "ck")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_small_file_that_is_a_link_out_is_not_published(name: str, tmp_path: Path) -> None:
    hf = fault_models.write_model(tmp_path / "hf")
    secret = tmp_path / "id_rsa"
    secret.write_text((hf / name).read_text() if (hf / name).exists() else "secret")
    (hf / name).unlink(missing_ok=True)
    (hf / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leaves the folder"):
        checkpoints.convert(hf, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--team--tiny"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = fault_models.write_model(cache / "blobs")
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    back = checkpoints.export(checkpoints.convert(snapshot, tmp_path / "ck"), tmp_path / "back")
    assert checkpoints.folders_differ(blobs, back) == []


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        hf = fault_models.write_model(tmp_path / name)
        (hf / name).unlink()
        os.mkfifo(hf / name)
        with pytest.raises(CheckpointError, match=r"is no file|neither"), bounded():
            checkpoints.convert(hf, tmp_path / "ck")
    with pytest.raises(SpecError, match="longer than"), bounded():
        run_spec.load(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers: 2147483647 is not a positive integer up to 4096"),
        ({"head_dim": 2**30}, "head_dim: 1073741824 is not a positive integer up to 65536"),
        (
            {"hidden_size": 2**30, "num_attention_heads": 1, "num_key_value_heads": 1},
            "head_dim 1073741824 is more",
        ),
        ({"rope_theta": 10**400}, "is not a positive number"),
        ({"vocab_size": 10**30}, "is not a positive integer"),
        ({"num_hidden_layers": True}, "is not a positive integer"),
        ({"rms_norm_eps": "1e-5"}, "is not a positive number"),
    ],
)
def test_a_config_with_impossible_numbers(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says), bounded():
        ModelSpec.from_hf_config({**fault_models.CONFIG, **changes})


def test_json_that_is_too_large_too_deep_or_ambiguous(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, says in (
        (b" " * (17 << 20), "larger than 16 MiB"),
        (b"[" * 1_000_000, "cannot be read as JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot be read as JSON"),
        (b'{"rope_theta": 1, "rope_theta": 2}', "a name appears twice"),
    ):
        path.write_bytes(text)
        with pytest.raises(CheckpointError, match=says), bounded():
            read_json(path)


def test_errors_are_short_and_obey_no_terminal_sequence() -> None:
    error = BridgeError("a\x1b[2J" + "x" * 10**6, details=["n\nforged\x07", "\udcff\u202e"], hint="h\x00")
    text = str(error)
    assert len(text) < 5000
    assert text.isascii()
    assert not [char for char in text if ord(char) < 32 and char != "\n"]
    assert "n\\nforged\\x07" in text
    assert printable("été 😀") == "été 😀"
