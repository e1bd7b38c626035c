"""tests/composition.py changes nothing of what Hydra composes."""

import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import Container, Node, OmegaConf

from training.command_line import hydra_config


def described(node: Node) -> list:
    """Its values, types and flags, and those of all that is in it."""
    told = vars(node._metadata) | {"resolver_cache": None}  # of the clock
    own = [type(node), told, node._get_parent() is not None]
    if not isinstance(node, Container) or not isinstance(node._content, (dict, list)):
        return [*own, node._value()]
    inside = node._content.items() if isinstance(node._content, dict) else enumerate(node._content)
    return [*own, *((key, described(each)) for key, each in inside)]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("experiment=break_it",),
        ("attention=triton", "model=modern", "optim=muon", "data=text", "logger=wandb"),
    ],
    ids=["default", "recipe", "choices"],
)
def test_it_composes_what_hydra_composes(monkeypatch, overrides):
    quick = [hydra_config(*overrides, with_hydra=True) for _ in range(2)]
    monkeypatch.setattr(OmegaConf, "load", staticmethod(OmegaConf.load.__wrapped__))
    monkeypatch.setattr(ConfigStore, "load", ConfigStore.load.__wrapped__)
    monkeypatch.delattr(ConfigStore, "__deepcopy__")
    whole = hydra_config(*overrides, with_hydra=True)
    assert described(quick[0]) == described(quick[1]) == described(whole)


def test_what_has_changed_is_read_again(tmp_path):
    path = tmp_path / "settings.yaml"
    for text, value in (("a: 1", 1), ("a: 2", 2), ("a: 1", 1)):
        path.write_text(text)
        with path.open() as file:
            found = OmegaConf.load(file)
        assert found == {"a": value}
        found.a = 9  # a copy

    for value in (1, 2):
        ConfigStore.instance().store("changing", {"a": value})
        found = ConfigStore.instance().load("changing.yaml").node
        assert found == {"a": value}
        found.a = 9
    del ConfigStore.instance().repo["changing.yaml"]
