"""Checkpoints and Hugging Face folders in buckets, through the command line, against a store on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import adapter_cases
import checkpoints
import fake_bucket
import pytest
from checkpoints import ITEMS, different, folders_differ, restore
from conftest import Tiny
from engine_trees import mark_of, marked, trained_run
from fake_bucket import Bucket

from bridge import bucket_store, places
from bridge.bucket_outputs import COMMIT
from bridge.errors import AccessError, BridgeError, CheckpointError, OutputError, UnsupportedError
from bridge.places import BucketPath

ROOT = f"gs://{fake_bucket.NAME}"
BRIDGE = Path(sys.executable).with_name("bridge")


@pytest.fixture
def source(tiny: Tiny) -> Path:
    """A tied model in bfloat16 with a tokenizer."""
    return tiny("tied", tokenizer="llama")


def bridge(bucket: Bucket, cwd: Path, *args: object) -> subprocess.CompletedProcess[str]:
    argv = [str(BRIDGE), *map(str, args)]
    return subprocess.run(argv, cwd=cwd, env=bucket.env, capture_output=True, text=True, timeout=300, check=False)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> bool:
    """Whether a command ended with an explained error that has all the words."""
    assert "Traceback" not in done.stderr
    assert "bridge: error:" in done.stderr, done.stderr
    return done.returncode == 1 and all(word in done.stderr for word in words)


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_a_checkpoint_there_and_back(engine: str, bucket: Bucket, source: Path, tmp_path: Path) -> None:
    done = bridge(bucket, tmp_path, "convert", source, "--to", engine, "--out", f"{ROOT}/ck", "--check")
    assert done.returncode == 0, done.stderr
    assert f"arrays in {ROOT}/ck\n" in done.stderr
    assert "every value read back through Orbax equals the source" in done.stderr
    assert {name.partition("/")[0] for name in bucket.names()} == {"ck"}  # nothing temporary is left

    fetched = bucket.fetch("ck", tmp_path / "fetched")
    local = checkpoints.convert(source, tmp_path / "local", engine=engine)
    item = ITEMS[engine]
    assert different(restore(fetched / "0" / item), restore(local / item)) == []
    for name in ("bridge.json", "hf/config.json", "hf/tokenizer.json"):
        assert (fetched / name).read_bytes() == (local.parent / name).read_bytes()

    facts = json.loads(bridge(bucket, tmp_path, "inspect", f"{ROOT}/ck", "--json").stdout)
    assert (facts["format"], facts["path"], facts["step"]) == (engine, f"{ROOT}/ck/0/{item}", 0)
    assert facts["sidecar"]["source"]["origin"] == str(source)
    done = bridge(bucket, tmp_path, "verify", f"{ROOT}/ck", "--exact", "--json")
    assert json.loads(done.stdout) == {"ok": True, "tensors": 29, "different": []}
    done = bridge(bucket, tmp_path, "export", f"{ROOT}/ck", "--out", "hf")
    assert done.returncode == 0, done.stderr
    assert folders_differ(source, tmp_path / "hf") == []
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not (tmp_path / "gs:").exists()


def test_what_is_missing_from_a_checkpoint_is_found(
    bucket: Bucket, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints.run("convert", source, "--to", "maxtext", "--out", f"{ROOT}/ck")
    kept = {name: bucket.read(name) for name in bucket.names("ck/")}

    def without(name: str, *args: object, words: str) -> None:
        bucket.delete(f"ck/{name}")
        with pytest.raises(CheckpointError, match=words):
            checkpoints.run(*args)
        bucket.write(f"ck/{name}", kept[f"ck/{name}"])

    kernel = "params.params.decoder.layers.mlp.wo.kernel"
    chunk = next(name for name in kept if f"{kernel}/c/" in name).removeprefix("ck/")
    exact = ("verify", f"{ROOT}/ck", "--exact")
    without(chunk, *exact, words=f"{kernel} cannot be read")
    without(f"0/items/{kernel}/zarr.json", *exact, words="1 arrays that its metadata names are not there")
    without("0/items/_METADATA", *exact, words=f"{ROOT}/ck has no finished checkpoint")
    without("bridge.json", *exact, words="nothing says what model it is")
    for path in ("ck", "ck/0", "ck/0/items"):
        words = f"{ROOT}/{path} has no finished checkpoint"
        without(f"0/{COMMIT}", "export", f"{ROOT}/{path}", "--out", "hf", words=words)
    assert list(tmp_path.iterdir()) == []
    assert json.loads(checkpoints.run(*exact, "--json").stdout)["ok"] is True
    flipped = bytearray(kept[f"ck/{chunk}"])
    flipped[len(flipped) // 3] ^= 1
    bucket.write(f"ck/{chunk}", bytes(flipped))
    done = checkpoints.run(*exact, "--json")
    assert (done.code, len(json.loads(done.stdout)["different"])) == (1, 1)


def test_a_run_that_an_engine_left_in_a_bucket(bucket: Bucket, source: Path, tmp_path: Path) -> None:
    """Steps are OCDBT written by stock Orbax; one without Orbax's own mark is not finished."""
    run = trained_run(tmp_path / "run", source, {10: marked(source, 1.0), 20: marked(source, 2.0)}, {10: 0.5, 20: 0.7})
    assert (run / "checkpoints" / "10" / "model_params" / "manifest.ocdbt").is_file()
    address = bucket.put(run, "runs/sft")
    for step in (10, 20):
        bucket.delete(f"runs/sft/checkpoints/{step}/{COMMIT}")
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        checkpoints.run("export", address, "--out", tmp_path / "no")
    bucket.write(f"runs/sft/checkpoints/20/{COMMIT}", b"")
    checkpoints.run("export", address, "--out", tmp_path / "newest")
    assert mark_of(tmp_path / "newest") == 2.0
    bucket.write(f"runs/sft/checkpoints/10/{COMMIT}", b"")
    checkpoints.run("export", address, "--out", tmp_path / "best")
    assert mark_of(tmp_path / "best") == 1.0
    checkpoints.run("export", address, "--step", "20", "--out", tmp_path / "asked")
    assert mark_of(tmp_path / "asked") == 2.0


def test_a_model_folder_in_a_bucket(
    bucket: Bucket, source: Path, tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sharded = tmp_path / "sharded"
    checkpoints.export(checkpoints.convert(source, tmp_path / "ck").parent, sharded, "--max-shard-size", "200KB")
    address = bucket.put(sharded, "models/hf")
    done = bridge(bucket, tmp_path, "convert", address, "--to", "tunix", "--out", "here")
    assert done.returncode == 0, done.stderr
    local = checkpoints.convert(source, tmp_path / "local", engine="tunix") / "model_params"
    assert different(restore(tmp_path / "here" / "0" / "model_params"), restore(local)) == []
    assert json.loads((tmp_path / "here" / "bridge.json").read_text())["source"]["origin"] == address

    ours, theirs = (json.loads(checkpoints.run("inspect", at, "--json").stdout) for at in (address, sharded))
    assert (ours["format"], ours) == ("hf", theirs)
    (tmp_path / "bridge.yaml").write_text(f"model: {{source: '{address}'}}\nengine: maxtext\n")
    checkpoints.run("convert", "--out", "spec")
    verified = checkpoints.run("verify", "spec", "--exact", "--json")  # its source is the one in the bucket
    assert json.loads(verified.stdout) == {"ok": True, "tensors": 29, "different": []}
    other = bucket.put(tiny("tied", tokenizer="llama", seed=7), "models/other")
    compared = checkpoints.run("diff", address, other, "--json")
    assert (compared.code, len(json.loads(compared.stdout)["value"])) == (1, 29)

    shard = next(name for name in bucket.names("models/hf/") if name.endswith(".safetensors"))
    again = ("convert", address, "--to", "tunix", "--out", "no")
    whole = bucket.read(shard)
    bucket.write(shard, whole[:-1])
    with pytest.raises(CheckpointError, match=f"{ROOT}/{shard} is truncated"):
        checkpoints.run(*again)
    bucket.delete(shard)
    with pytest.raises(CheckpointError, match=f"{address} is incomplete") as found:
        checkpoints.run(*again)
    assert f"{Path(shard).name} is missing" in str(found.value)
    bucket.write(shard, whole)
    bucket.delete("models/hf/config.json")
    with pytest.raises(CheckpointError, match=f"{address}/config.json does not exist"):
        checkpoints.run(*again)
    assert not (tmp_path / "no").exists()


def test_adapters(bucket: Bucket, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    factors = adapter_cases.random_factors(json.loads((source / "config.json").read_text()), 4)
    adapter = adapter_cases.write_peft(tmp_path / "adapter", factors, 4, 8.0)
    base = bucket.put(source, "base")
    for to, model in ((f"{ROOT}/ck", base), ("ck", source)):
        checkpoints.run("convert", adapter, "--base", model, "--to", "maxtext", "--out", to)
    for form, file in (("peft", "adapter_model.safetensors"), ("hf", "model.safetensors")):
        checkpoints.run("export", f"{ROOT}/ck", "--to", form, "--out", f"{ROOT}/{form}")
        checkpoints.run("export", "ck", "--to", form, "--out", form)
        assert bucket.read(f"{form}/{file}") == (tmp_path / form / file).read_bytes()
    exact = ("verify", f"{ROOT}/ck", "--exact", "--json", "--reference")
    assert checkpoints.run(*exact, f"{ROOT}/hf").code == 0
    assert checkpoints.run(*exact, base).code == 1  # not the merge
    with pytest.raises(UnsupportedError, match=r"adapter_model\.safetensors lies in a bucket"):
        checkpoints.run("convert", f"{ROOT}/peft", "--base", source, "--to", "maxtext", "--out", "no")
    assert not (tmp_path / "no").exists()


def test_an_export_into_a_bucket(bucket: Bucket, source: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.convert(source, tmp_path / "ck").parent
    local = checkpoints.export(checkpoint, tmp_path / "hf", "--max-shard-size", "200KB")
    args = ("export", checkpoint, "--out", f"{ROOT}/out/hf")
    done = bridge(bucket, tmp_path, *args, "--max-shard-size", "200KB")
    assert done.returncode == 0, done.stderr
    assert f"in {ROOT}/out/hf\n" in done.stderr
    assert {name: bucket.read(name) for name in bucket.names()} == {
        f"out/hf/{path.name}": path.read_bytes() for path in local.iterdir()
    }
    assert len([name for name in bucket.names() if name.endswith(".safetensors")]) > 2
    assert refused(bridge(bucket, tmp_path, *args), f"{ROOT}/out/hf exists", "--overwrite")
    checkpoints.run(*args, "--overwrite")  # one file now
    names = [name.removeprefix("out/hf/") for name in bucket.names()]
    assert [name for name in names if "model" in name and name != "tokenizer.model"] == ["model.safetensors"]
    assert folders_differ(bucket.fetch("out/hf", tmp_path / "fetched"), source) == []
    with pytest.raises(OutputError, match="cannot be an output"):
        checkpoints.run("export", checkpoint, "--out", ROOT)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gs://", "is no name of a bucket"),
        ("gs://UPPER/ck", "'UPPER' is no name of a bucket"),
        ("gs://a/ck", "'a' is no name of a bucket"),
        (f"{ROOT}/../ck", "tools of buckets take for something else"),
        (f"{ROOT}/c*k", "tools of buckets take for something else"),
        ("s3://bucket/ck", "is not on a file system of this host"),
        (f"{ROOT}/nothing", "there is nothing at"),
        ("gs://no-such-bucket/ck", "there is nothing at"),
    ],
)
def test_addresses_that_mean_nothing(
    address: str, words: str, bucket: Bucket, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BridgeError, match=words):
        checkpoints.run("convert", address, "--to", "maxtext", "--out", "ck")
    if "nothing at" not in words:
        with pytest.raises(BridgeError, match=words):
            checkpoints.run("convert", source, "--to", "maxtext", "--out", address)
    assert list(tmp_path.iterdir()) == []
    assert bucket.names() == []


def test_what_opens_folders_by_name_refuses_a_bucket(bucket: Bucket, source: Path) -> None:
    from bridge.converters.parity import pytorch

    address = places.place(bucket.put(source, "hf"))
    with pytest.raises(UnsupportedError, match=f"{ROOT}/hf lies in a bucket, and this works on folders"):
        pytorch.logits(address, (), double=False)
    with pytest.raises(UnsupportedError, match="written whole"):
        (address / "metrics.jsonl").open("a")


def test_a_store_that_cannot_be_reached_is_said(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from gcsfs.retry import HttpError

    def forbidden(*_: object, **__: object) -> None:
        raise HttpError({"code": 403, "message": "no access"})

    bucket.write("x", b"here")
    place = BucketPath(f"//{fake_bucket.NAME}/x")
    assert (place.read_bytes(), place.read_range(1, 2)) == (b"here", b"er")
    with pytest.raises(CheckpointError, match="ended at byte 4"):
        place.read_range(2, 3)
    with pytest.raises(FileNotFoundError):
        (place.parent / "y").read_bytes()
    monkeypatch.setattr(bucket_store.store(), "cat_file", forbidden)
    with pytest.raises(AccessError, match="the bucket answered: no access, 403") as found:
        place.read_bytes()
    assert "gcloud auth" in str(found.value)
