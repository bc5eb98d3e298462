"""A rank 0 that lies before the first round: what it tells the others to run."""

import dataclasses
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.config import Config
from fedmpi.liars.base import ServerAttack, Verdict, changed, first_values, only_secure, tree
from fedmpi.liars.stage import CANARY, Forged, Quiet
from fedmpi.runtime import build
from fedmpi.runtime.start import Start
from fedmpi.transport.endpoint import Endpoint
from fedmpi.wire.bits import unpack
from fedmpi.wire.message import Message
from fedmpi.wire.messages import PlainInput, Ready, Setup


class OrdersAttack(ServerAttack):
    """What the ranks must not agree to: whoever says that it is ready has agreed."""

    wants: str

    def judge(self) -> Verdict:
        ready = self.heard_of(Ready)
        if not ready:
            return Verdict("nothing: no rank got ready for it")
        return Verdict(f"{self.wants} of {len(ready)} ranks", broken=True)


class Downgrade(OrdersAttack):
    name = "downgrade"
    tries = "orders plain, passive, epsilon inf, sigma 0 in its Setup: wants noiseless updates in the clear"
    wants = "a run without masks and noise"

    def fits(self, config: Config) -> str:
        return only_secure(config)

    def said(self, config: Config, act: int) -> Config:
        config = changed(config, "aggregation", aggregation="plain", adversary="passive", pki=None)
        return changed(config, "privacy", epsilon=math.inf)

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        self.encoding = build.mechanism(start.orders, build.algorithm(start.orders.config, device="cpu")).encoding
        super().play(endpoint, start, terminal, act)

    def judge(self) -> Verdict:
        clear = sorted(self.heard_of(PlainInput), key=lambda message: (message.round, message.party))
        if not clear:
            return super().judge()
        total = unpack(clear[0].values, self.encoding.dimension, self.encoding.bits)
        shown = first_values(self.encoding.decode(self.encoding.unwrap(np.asarray(total, np.uint64))))
        return Verdict(f"{len(clear)} updates in the clear and without noise, party {clear[0].party}'s {shown}", True)


class Unsigned(OrdersAttack):
    name = "unsigned"
    tries = "orders passive to ranks that were started with --pki: wants keys that nobody signed"
    adversaries = ("active",)
    wants = "a run without signatures"

    def said(self, config: Config, act: int) -> Config:
        return changed(config, "aggregation", adversary="passive", pki=None)


class Sigma(OrdersAttack):
    name = "sigma"
    tries = "orders what was agreed, but a tenth of the noise: wants updates that stand out of it"
    wants = "updates with a tenth of their noise"

    def fits(self, config: Config) -> str:
        return "epsilon = inf: there is no noise to take away" if math.isinf(config.privacy.epsilon) else ""

    def play(self, endpoint: Endpoint, start: Start, terminal: Quiet, act: int) -> None:
        orders = dataclasses.replace(start.orders, multiplier=start.orders.multiplier / 10)
        super().play(endpoint, start._replace(orders=orders), terminal, act)


class Paths(ServerAttack):
    """First as a run to go on with, which is refused by itself; then as a new one, in which ranks keep to their own folders."""

    name = "paths"
    tries = "names other folders to work in (out, resume, cache, data, pki): wants files there changed or deleted"
    acts = 2

    def lead(self, endpoint: Endpoint, config: Config, act: int) -> None:
        if act == 0:
            self.folder = Path(tempfile.mkdtemp(prefix="fedmpi-canary-"))
            for name in (
                "0/config.yaml",
                "0/checkpoint/1/parties-00000-00001.npz",
                "0/checkpoint/7/thesis.tex",
                "1/config.yaml",
            ):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_text("precious")
            self.before = tree(self.folder)
        try:
            super().lead(endpoint, config, act)
        finally:
            if act == self.acts - 1:
                self.after = tree(self.folder)
                shutil.rmtree(self.folder, ignore_errors=True)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        if isinstance(message, Setup):
            fields = json.loads(message.config)
            named = {"run": ("out",), "data": ("data_dir", "cache_dir"), "aggregation": ("pki",)}
            for layer, names in named.items():
                fields["config"][layer] |= dict.fromkeys(names, str(self.folder / str(self.act)))
            if self.act == 0:
                fields["resume_round"] = 1
                fields["config"]["run"]["resume"] = fields["config"]["run"]["out"]
            message = dataclasses.replace(message, config=json.dumps(fields, sort_keys=True))
        return [message]

    def judge(self) -> Verdict:
        if self.after != self.before:
            names = {*self.before, *self.after}
            touched = sorted(name for name in names if self.before.get(name, "") != self.after.get(name, ""))
            return Verdict(f"{len(touched)} files there were made, changed or deleted, as {touched[0]}", broken=True)
        looked = [rank for act in self.reports for rank, report in act.items() if str(self.folder) in report.refused]
        if looked:
            return Verdict(f"rank {', '.join(map(str, sorted(set(looked))))} looked for its files there", broken=True)
        taken = "the other ranks kept to their own folders" if self.heard_of(Ready) else "no rank got ready for it"
        return Verdict(f"nothing: no file there was touched; {taken}")


class Module(OrdersAttack):
    name = "module"
    tries = "names another method, module:Class, which ranks would have to import: wants its code to run there"
    wants = "another method run"

    def lead(self, endpoint: Endpoint, config: Config, act: int) -> None:
        sys.modules.pop(CANARY, None)
        super().lead(endpoint, config, act)

    def says(self, endpoint: Forged, rank: int, message: Message) -> Iterable[Message]:
        if isinstance(message, Setup):
            fields: dict[str, Any] = json.loads(message.config)
            fields["config"]["run"]["method"] = f"{CANARY}:Method"
            message = dataclasses.replace(message, config=json.dumps(fields, sort_keys=True))
        return [message]

    def judge(self) -> Verdict:
        ranks = [rank for rank, report in sorted(self.reports[-1].items()) if report.canary]
        if ranks:
            return Verdict(f"its module was imported by rank {', '.join(map(str, ranks))}", broken=True)
        return super().judge()
