"""Data from object storage, on an S3 server."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import fsspec
import pytest

from foundation import storage
from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.settings import at_home, copied_path, local_path
from foundation.storage import address_of, fetch, path_for
from tests.conftest import contents
from tests.object_storage import Server


def write(address: str, content: bytes) -> None:
    with fsspec.open(address, "wb") as file:
        file.write(content)


def put(address: str, content: bytes) -> None:
    """Write an object as another program does, without fsspec's cache of lists of objects."""
    bucket, _, key = address.removeprefix("s3://").partition("/")
    files, _ = fsspec.url_to_fs(address)
    files.call_s3("put_object", Bucket=bucket, Key=key, Body=content)


def requests_for(server: Server, name: str) -> list[str]:
    return [method for method, path in server.requests if path.endswith(name)]


@pytest.fixture
def data(bucket: str) -> str:
    """Address of a folder with three objects."""
    for name in ("a.jsonl", "über uns/b.jsonl", "c.txt"):
        write(f"{bucket}/data/{name}", name.encode())
    return f"{bucket}/data"


def test_fetch_copies_the_objects_of_a_folder_or_pattern(data: str) -> None:
    """Objects that a console creates for folders are ignored."""
    files, _ = fsspec.url_to_fs(data)
    for folder in (f"{data}/", f"{data}/empty/"):
        put(folder, b"")
    assert fetch(f"{data}/**/*.jsonl") == path_for(f"{data}/**/*.jsonl")
    assert contents(path_for(data)).keys() == {"a.jsonl", "über uns/b.jsonl"}
    copies = contents(fetch(data))
    assert copies == {name: name.encode() for name in ("a.jsonl", "über uns/b.jsonl", "c.txt")}
    files.rm(f"{data}/c.txt")
    assert contents(fetch(data)).keys() == {"a.jsonl", "über uns/b.jsonl"}


def test_fetch_copies_an_object_once(data: str, s3_server: Server) -> None:
    """An interrupted copy is repeated."""
    first = path_for(f"{data}/a.jsonl")
    first.parent.mkdir(parents=True)
    first.write_bytes(b"a.j")
    assert fetch(f"{data}/a.jsonl") == first
    assert first.read_bytes() == b"a.jsonl"
    modified = first.stat().st_mtime_ns
    s3_server.requests.clear()
    fetch(f"{data}/a.jsonl")
    assert "GET" not in requests_for(s3_server, "a.jsonl")
    first.unlink()
    # Packs recognise their source by the time of its files, also on another machine.
    assert fetch(data).joinpath("a.jsonl").stat().st_mtime_ns == modified


@pytest.mark.parametrize("name", ["", "/*.jsonl", "/a.jsonl"])
def test_fetch_replaces_changed_objects(data: str, name: str) -> None:
    fetch(f"{data}{name}")
    open_copy = path_for(f"{data}/a.jsonl").open("rb")
    put(f"{data}/a.jsonl", b"changed")  # the same number of bytes
    fetch(f"{data}{name}")
    assert path_for(f"{data}/a.jsonl").read_bytes() == b"changed"
    # A training that reads the earlier copy keeps it.
    assert open_copy.read() == b"a.jsonl"
    open_copy.close()


def test_an_object_that_changes_while_it_is_copied_is_copied_again(
    data: str, s3_server: Server
) -> None:
    written = []

    def change(method: str, path: str) -> None:
        if method == "GET" and path.endswith("a.jsonl") and not written:
            written.append(path)
            write(f"{data}/a.jsonl", b"changed")

    s3_server.fault = change
    fetch(data)
    assert fetch(f"{data}/a.jsonl").read_bytes() == b"changed"
    assert requests_for(s3_server, "a.jsonl").count("GET") == 2


def test_processes_wait_for_the_copies_of_another(data: str, s3_server: Server) -> None:
    threads = [threading.Thread(target=fetch, args=(data,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert requests_for(s3_server, "c.txt").count("GET") == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("s3://missing-bucket/a", "The specified bucket does not exist"),
        ("{data}/none", "no such object or folder"),
        ("{data}/*.csv", "no such object or folder"),
        ("s4://bucket/a", "Protocol not known: s4"),
        ("{data}/../a", "has an empty part"),
        ("{data}/x", "y: has an empty part, `.` or `..`"),
    ],
)
def test_fetch_names_the_address_that_cannot_be_read(data: str, address: str, reason: str) -> None:
    write(f"{data}/x/../../y", b"")
    address = address.format(data=data)
    with pytest.raises(InputError, match=reason) as error:
        fetch(address)
    assert str(error.value).startswith((f"{address}: ", f"{data}/x/.."))


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:SECRET@bucket/run",
        "s3://KEY:SEC/RET@bucket/run",
        "hf://SECRET@datasets/a/b",
        "https://machine/a.jsonl?X-Amz-Signature=SECRET",
        "s3://bucket/run#SECRET",
    ],
)
@pytest.mark.parametrize("prefix", ["", "run_dir=", "--data.packs="])
def test_a_secret_in_an_address_is_refused_and_not_printed(address: str, prefix: str) -> None:
    parser = CommandParser()
    parser.add_argument("settings", nargs="*")
    for refuse in (lambda text: parser.read([prefix + text]), local_path, copied_path, at_home):
        with pytest.raises(InputError, match="may contain a secret") as error:
            refuse(address)
        assert "SEC" not in str(error.value)


def test_fetch_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "not_installed.FileSystem", "err": "Install not_installed"}
    registry = sys.modules["fsspec.registry"]
    monkeypatch.setitem(registry.known_implementations, "gs", missing)
    monkeypatch.setattr(registry, "_registry", {})
    with pytest.raises(InputError, match=r"^gs://bucket/a: ImportError: Install not_installed"):
        fetch("gs://bucket/a")


def test_copies_have_the_name_of_their_address() -> None:
    path = path_for("s3://bucket/a b/ü.jsonl")
    assert path == storage.COPIES / "s3/bucket/a b/ü.jsonl"
    assert address_of(path) == "s3://bucket/a b/ü.jsonl"
    assert address_of(Path("packs/a")) == "packs/a"
