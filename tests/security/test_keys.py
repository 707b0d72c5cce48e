"""The file of API keys, and `flyspec keys new`."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys

import pytest

from flyspec.errors import ConfigError
from flyspec.security import ApiKey, ApiKeys, Scope
from flyspec.security.keys import entry_of, hash_of, new_key, read_keys

GENERATE = frozenset({Scope.GENERATE})


def test_keys_are_long_and_random_and_only_their_hash_is_in_the_file(tmp_path):
    keys = [new_key() for _ in range(100)]
    assert len(set(keys)) == 100
    assert all(key.startswith("fsk_") and len(key) >= 4 + 43 for key in keys)
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(entry_of(k, ApiKey(f"c{i}", GENERATE)) for i, k in enumerate(keys)))
    assert not any(key[4:] in file.read_text() for key in keys)
    found = ApiKeys(str(file))
    assert [found.find(key).name for key in keys] == [f"c{i}" for i in range(100)]
    assert found.find(new_key()) is None
    assert found.find("") is None
    assert found.find(keys[0] + "x") is None
    assert found.find(keys[0].upper()) is None
    assert found.find("\udcff\U0001f600") is None
    assert found.find(hash_of(keys[0])) is None


def test_an_entry_has_all_that_its_owner_may(tmp_path):
    owner = ApiKey(
        "a.b-c_d@e",
        frozenset({Scope.GENERATE, Scope.ADMIN}),
        max_concurrent=2,
        max_requests_per_minute=3,
        max_tokens_per_request=4,
        expires=datetime.datetime(2999, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    )
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("fsk_x", owner))
    assert read_keys(str(file)) == [(hash_of("fsk_x").encode(), owner)]
    assert not owner.expired
    assert ApiKey("a", GENERATE, expires=datetime.datetime.now(datetime.UTC)).expired


def test_two_keys_of_one_name_let_one_be_changed_without_a_pause(tmp_path):
    file = tmp_path / "keys.toml"
    hashes = [hash_of("old"), hash_of("new")]
    file.write_text(f'[[keys]]\nname = "a"\nhash = {json.dumps(hashes)}\nscopes = ["generate"]\n')
    keys = ApiKeys(str(file))
    assert keys.find("old") == keys.find("new") == ApiKey("a", GENERATE)


def test_a_file_that_changes_is_read_again_and_one_that_is_wrong_changes_nothing(tmp_path, caplog):
    file = tmp_path / "keys.toml"
    file.write_text(entry_of("one", ApiKey("one", GENERATE)))
    keys = ApiKeys(str(file))
    assert keys.find("one")
    file.write_text(entry_of("two", ApiKey("two-", GENERATE)))
    assert keys.find("one") is None
    assert keys.find("two")
    file.write_text("not TOML at all")
    assert keys.find("two")
    assert "keeping the old" in caplog.text


ENTRY = '[[keys]]\nname = "a"\nscopes = ["generate"]\n'
HASH = f'hash = "{hash_of("k")}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[keys", "not valid TOML"),
        ('[[keys]]\nname = "a"\n' + HASH, r"keys.0.scopes: Field required"),
        (ENTRY, r"keys.0.hash: Field required"),
        (ENTRY + 'hash = "fsk_secret"', r"keys.0.hash: .*must be sha256: and 64 hex"),
        (ENTRY.replace("generate", "all") + HASH, r"keys.0.scopes.0: Input should be 'generate'"),
        (ENTRY.replace('"a"', '"a b"') + HASH, r"keys.0.name: String should match"),
        (ENTRY + HASH + "max_concurrent = 0", r"keys.0.max_concurrent: .*greater than or equal to"),
        (ENTRY + HASH + "limit = 1", r"keys.0.limit: Extra inputs"),
        (ENTRY + HASH + ENTRY + HASH, r"two entries are named 'a'"),
        (ENTRY + HASH + ENTRY.replace('"a"', '"b"') + HASH, r"'b' has a hash that is already"),
        ("other = 1", r"other: Extra inputs"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_and_no_key_with_it(tmp_path, text, message):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-keys-file .*keys.toml: .*{message}") as caught:
        read_keys(str(file))
    assert "fsk_secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"--api-keys-file .*no: No such file"):
        read_keys(str(tmp_path / "no"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from flyspec.cli.main import main; sys.argv[0] = 'flyspec'; main()"
    command = [sys.executable, "-c", code, "keys", "new", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_a_key_once_and_what_makes_it_known(tmp_path):
    limits = ("--max-concurrent", "2", "--max-requests-per-minute", "60", "--days", "1")
    made = run("team-a", "--scope", "generate", "--scope", "admin", *limits, "--json")
    document = json.loads(made.stdout)
    file = tmp_path / "keys.toml"
    file.write_text(document["toml"])
    owner = ApiKeys(str(file)).find(document["key"])
    assert owner.name == "team-a"
    assert owner.scopes == {Scope.GENERATE, Scope.ADMIN}
    assert (owner.max_concurrent, owner.max_requests_per_minute) == (2, 60)
    assert not owner.expired
    said = run("team-a")
    assert said.returncode == 0
    assert said.stdout.count("fsk_") == 1
    assert 'scopes = ["generate"]' in said.stdout
    wrong = run("team a")
    assert wrong.returncode == 2
    assert "a name must be 1 to 64 letters" in wrong.stderr
