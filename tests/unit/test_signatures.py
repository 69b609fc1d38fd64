"""Plans that are signed, and what only they may do."""

import os
import shutil
import stat
import sys
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from programs import block, cache_of, tuner_of, write_version
from typer.testing import CliRunner

from cudnn_fusion.environment import cpu_compatibility
from cudnn_fusion.plan import Plan, PlanFormatError, sha256_hex
from cudnn_fusion.plan_store import Found, Miss, PlanStore
from cudnn_fusion.settings import Settings, SettingsError
from cudnn_fusion.shapes import Bucket
from cudnn_fusion.store_upkeep import StoreKeeper
from cudnn_fusion.trust import Signer, TrustError, Verifier, make_key
from tools.plans import app

HERE = cpu_compatibility()
BUCKET = Bucket.of({"batch": 2})


def plans(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    program = write_version(directory / "model", block())
    tuner = tuner_of(program, PlanStore(directory / "plans"))
    tuner.tune(BUCKET, None)
    return tuner


@pytest.fixture
def key(tmp_path):
    """A private key's file and the public key."""
    return tmp_path / "key.pem", make_key(tmp_path / "key.pem")


@pytest.fixture
def store(tuned, tmp_path):
    """A store of this CPU's two plans, each with a blob."""
    copy = StoreKeeper(tmp_path / "plans")
    for plan in tuned.store.plans(HERE.hash()):
        copy.publish(HERE, replace(plan, blob_sha256=sha256_hex(b"blob")), b"blob")
    return copy


def found(store, public_key):
    """What a server that trusts only this key finds."""
    verified = PlanStore(store.root, Verifier(public_key))
    keys = [plan.key for plan in PlanStore(store.root).plans(HERE.hash())]
    return [verified.find(HERE, key) for key in keys]


class TestFinding:
    def test_signed_plans_are_found_and_unsigned_ones_are_misses(self, store, key):
        private, public = key
        assert all("is not signed" in miss.reason for miss in found(store, public))
        assert store.sign(Signer(private)) == 2
        assert all(isinstance(answer, Found) for answer in found(store, public))
        assert store.plans(HERE.hash()) == PlanStore(store.root, Verifier(public)).plans(HERE.hash())

    def test_another_key_signs_nothing(self, store, key, tmp_path):
        store.sign(Signer(key[0]))
        answers = found(store, make_key(tmp_path / "another.pem"))
        assert all("is not what was signed, or by another key" in miss.reason for miss in answers)

    def test_any_change_of_the_record_is_a_miss(self, store, key):
        store.sign(Signer(key[0]))
        plan = store.plans(HERE.hash())[0]
        changes = {
            "candidate": replace(plan.candidate, form="row_major"),
            "workspace_bytes": 1,
            "time_us": 0.5,
            "blob_sha256": sha256_hex(b"evil"),
            "made_at": "2099-01-01T00:00:00+00:00",
        }
        for field, value in changes.items():
            changed = replace(plan, **{field: value})
            store.publish(HERE, changed, b"evil" if field == "blob_sha256" else b"blob")
            assert isinstance(PlanStore(store.root, Verifier(key[1])).find(HERE, plan.key), Miss), field
            assert isinstance(PlanStore(store.root).find(HERE, plan.key), Found), field

    def test_a_signature_moved_to_another_plan_or_environment_is_none(self, store, key):
        store.sign(Signer(key[0]))
        first, second = store.plans(HERE.hash())
        signature = store.signature(HERE.hash(), first.key)
        store.publish_signature(HERE, second.key, signature)
        elsewhere = replace(HERE, device_name="another")
        store.publish(elsewhere, first, b"blob", signature)
        verified = PlanStore(store.root, Verifier(key[1]))
        assert isinstance(verified.find(HERE, first.key), Found)
        assert isinstance(verified.find(HERE, second.key), Miss)
        assert isinstance(verified.find(elsewhere, first.key), Miss)
        assert verified.find_elsewhere(HERE, first.key) == []

    @pytest.mark.parametrize("content", [b"", b"x" * 64, b"x" * 4096])
    def test_a_damaged_signature_is_a_miss(self, store, key, content):
        store.sign(Signer(key[0]))
        for path in store.root.glob("*/signatures/*"):
            path.write_bytes(content)
        assert all(isinstance(answer, Miss) for answer in found(store, key[1]))

    def test_signatures_travel_with_plans(self, store, key, tmp_path):
        store.sign(Signer(key[0]))
        store.export(tmp_path / "plans.tar.gz")
        arrived = StoreKeeper(tmp_path / "arrived")
        arrived.root.mkdir()
        arrived.import_from(tmp_path / "plans.tar.gz")
        assert all(isinstance(answer, Found) for answer in found(arrived, key[1]))

    def test_a_signature_reaches_the_same_plan_that_is_there_unsigned(self, store, key, tmp_path):
        """The key is on another machine: plans go there, and their signatures come back."""
        shutil.copytree(store.root, tmp_path / "signing")
        StoreKeeper(tmp_path / "signing").sign(Signer(key[0]))
        assert store.merge_from(PlanStore(tmp_path / "signing")) == 0
        assert all(isinstance(answer, Found) for answer in found(store, key[1]))

    def test_a_record_that_cannot_be_written_is_signed_by_nobody(self, store, key):
        plan = replace(store.plans(HERE.hash())[0], provenance={"product": float("inf")})
        assert not Verifier(key[1]).has_signed(HERE.hash(), plan, b"x" * 64)
        with pytest.raises(PlanFormatError, match="finite"):
            Plan.from_json(plan.to_json())

    def test_recipes_are_signed_too(self, tuned, tmp_path, key):
        """Plans of another environment choose what is built here."""
        elsewhere = replace(HERE, threads=(HERE.threads or 0) + 62)
        store = StoreKeeper(tmp_path / "moved")
        for plan in tuned.store.plans(HERE.hash()):
            store.publish(elsewhere, plan, None)
        wanted = [(work.segment, work.sizes) for work in tuned.work(BUCKET)]
        verified = PlanStore(store.root, Verifier(key[1]))
        assert {answer.origin for answer in cache_of([verified]).plan(wanted)} == {"reference"}
        store.sign(Signer(key[0]))
        assert {answer.origin for answer in cache_of([verified]).plan(wanted)} == {"recipe"}


class TestKeys:
    def test_a_private_key_is_its_owners_alone_and_never_replaced(self, key):
        private, public = key
        assert stat.S_IMODE(os.stat(private).st_mode) == 0o600
        assert Signer(private).public_key == public
        before = private.read_bytes()
        with pytest.raises(TrustError, match="name a file that is not there"):
            make_key(private)
        assert private.read_bytes() == before

    @pytest.mark.parametrize("text", ["", "abc", "x" * 44, "AAAA", "ä" * 44])
    def test_what_is_no_public_key_is_refused(self, text):
        with pytest.raises(TrustError, match="is no public key: give the 44 characters"):
            Verifier(text)

    def test_what_is_no_private_key_is_refused(self, tmp_path):
        with pytest.raises(TrustError, match="holds no private key"):
            Signer(tmp_path / "absent")
        (tmp_path / "text").write_text("no key")
        with pytest.raises(TrustError, match="holds no private key"):
            Signer(tmp_path / "text")
        other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / "rsa").write_bytes(pem)
        with pytest.raises(TrustError, match="another kind than Ed25519"):
            Signer(tmp_path / "rsa")

    def test_without_the_library_nothing_is_trusted(self, key, monkeypatch):
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
        with pytest.raises(TrustError, match="pip install cryptography"):
            Verifier(key[1])


class TestSettings:
    def test_signed_needs_a_key(self):
        signed = Settings.from_parameters({"PLAN_TRUST": "signed", "PLAN_PUBLIC_KEY": "k"})
        assert (signed.plan_trust, signed.plan_public_key) == ("signed", "k")
        assert Settings.from_parameters({"PLAN_TRUST": ""}).plan_trust == "any"
        with pytest.raises(SettingsError, match="PLAN_PUBLIC_KEY must say by which key"):
            Settings.from_parameters({"PLAN_TRUST": "signed"})
        with pytest.raises(SettingsError, match="must be one of any, signed"):
            Settings.from_parameters({"PLAN_TRUST": "all"})


def test_the_commands_make_keys_sign_and_verify(store, tmp_path):
    private = tmp_path / "private.pem"
    public = plans("keygen", private).stdout.strip()
    assert len(public) == 44
    assert plans("verify", store.root, "--public-key", public).exit_code == 1
    signed = plans("sign", store.root, "--key", private)
    assert f"2 plans of {store.root} signed; public key {public}" in " ".join(signed.stdout.split())
    assert plans("verify", store.root, "--public-key", public).exit_code == 0
    assert plans("keygen", private).exit_code == 1
    assert plans("verify", store.root, "--public-key", "x").exit_code == 1
