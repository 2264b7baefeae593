import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcore.errors import BrokenSuccession, InvalidKey
from fedcore.signing import MOST_SUCCESSORS, SucceedingKey, Succession, Successor

pytestmark = pytest.mark.security("Devices follow a chain of signatures … they never go back")


def test_every_earlier_key_leads_to_the_one_that_holds_now():
    first = SucceedingKey.new("server")
    second = first.successor()
    third = second.successor()
    for key in (first, second, third):
        assert third.succession.follow("server", key.public) == third.public


def test_a_key_without_a_succession_from_the_pinned_one_is_refused():
    pinned, other = SucceedingKey.new("server"), SucceedingKey.new("server")
    with pytest.raises(BrokenSuccession, match=other.public.hex()[:16]):
        other.succession.follow("server", pinned.public)
    with pytest.raises(BrokenSuccession):
        pinned.succession.follow("server", pinned.successor().public)  # back to the old key


def test_a_successor_that_another_key_signed_is_refused():
    pinned, other = SucceedingKey.new("server"), SucceedingKey.new("server")
    stolen = other.successor().succession.successors[0]
    with pytest.raises(BrokenSuccession, match="did not sign"):
        Succession(pinned.public, (stolen,)).follow("server", pinned.public)


def test_a_statement_of_one_role_is_none_of_another():
    authority = SucceedingKey("authority", Ed25519PrivateKey.generate())
    with pytest.raises(BrokenSuccession):
        authority.successor().succession.follow("server", authority.public)


def test_of_a_long_succession_the_oldest_keys_are_left_out():
    keys = [SucceedingKey.new("server")]
    for _ in range(MOST_SUCCESSORS + 1):
        keys.append(keys[-1].successor())
    shown = msgspec.json.decode(msgspec.json.encode(keys[-1].succession), type=Succession)
    assert shown.follow("server", keys[1].public) == keys[-1].public
    with pytest.raises(BrokenSuccession):
        shown.follow("server", keys[0].public)


def test_a_key_comes_out_of_its_file_as_it_went_in(tmp_path):
    key, path = SucceedingKey.new("server").successor(), tmp_path / "server.key"
    key.save(path)
    found = SucceedingKey.load("server", path)
    assert (found.private.private_bytes_raw(), found.succession) == (key.private.private_bytes_raw(), key.succession)
    assert path.stat().st_mode & 0o077 == 0
    assert [one.name for one in tmp_path.iterdir()] == ["server.key"]
    with pytest.raises(FileExistsError):
        SucceedingKey.new("server").save(path)
    key.successor().save(path, replace=True)
    assert SucceedingKey.load("server", path).succession.follow("server", key.public) != key.public


@pytest.mark.parametrize("damage", ["short", "role", "private", "chain"])
def test_a_file_that_holds_no_such_key_is_refused_by_name(tmp_path, damage):
    key, path = SucceedingKey.new("server"), tmp_path / "server.key"
    if damage == "chain":
        false = Successor(key.successor().public, bytes(64))
        key.succession = Succession(SucceedingKey.new("server").public, (Successor(key.public, false.signature),))
    if damage == "private":
        key.private = Ed25519PrivateKey.generate()
    key.save(path)
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InvalidKey, match=r"server\.key"):
        SucceedingKey.load("authority" if damage == "role" else "server", path)
