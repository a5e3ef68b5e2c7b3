"""Finds routes for calls and holds room for them: the rim around reservations and planning."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

from meshnet.routing import NoRouteAvailable, Plan, RoutingFailure, Stage
from meshnet.tracker import planning, reservations
from meshnet.tracker.jobs import Chosen, Experience, Job, NoPlace
from meshnet.tracker.members import Node
from meshnet.tracker.planning import ModelRouting, RouteRefused, View
from meshnet.tracker.reservations import Need, Waiting
from meshnet.tracker.roster import Roster

REMEMBER_ENDED_S = 5.0
MAX_ENDED = 10_000
MAX_PLANS = 1_024
DURATION_ALPHA = 0.1


class Placement:
    """All of it runs on one event loop and nothing here waits but `place`."""

    def __init__(
        self,
        roster: Roster,
        routing_of: Callable[[str], ModelRouting],
        experience: Experience,
        *,
        queue_length: int,
        queue_length_per_key: int,
    ) -> None:
        self._roster = roster
        self._routing_of = routing_of
        self._experience = experience
        self.state = reservations.State(queue_length, queue_length_per_key)
        self._jobs: dict[str, tuple[Job, asyncio.Future[Chosen]]] = {}
        self._ended: OrderedDict[str, tuple[float, reservations.Needs]] = OrderedDict()
        self._views: dict[str, tuple[int, list[View]]] = {}
        self._plans: dict[Hashable, tuple[View, Plan]] = {}
        self._pumping = False
        self._average_s = 5.0
        roster.on_change(self._node_changed)

    # ------------------------------------------------------------ reading

    def views(self, model: str) -> list[View]:
        """What can be routed over now, best covered first; cached until the mesh changes."""
        cached = self._views.get(model)
        if cached is not None and cached[0] == self._roster.version:
            return cached[1]
        state = self._roster.state
        found = planning.views(
            state.nodes.values(), state.links, model, self._roster.clock(), self._experience.times
        )
        if len(self._views) > 256:
            self._views.clear()
        self._views[model] = (self._roster.version, found)
        return found

    def room_of(self, model: str) -> Callable[[str], Need]:
        return lambda node_id: reservations.room(self.state, (node_id, model))

    def position(self, call_id: str) -> int | None:
        return reservations.position(self.state, call_id)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def retry_after(self) -> int:
        """Seconds until a queue as long as now's has moved on."""
        slots = sum(room.total.slots for room in self.state.rooms.values())
        return reservations.retry_after_s(self.waiting, max(1, slots // 2), self._average_s)

    # ------------------------------------------------------------ placing

    def submit(self, job: Job) -> asyncio.Future[Chosen]:
        """Asks for a route with room. The future is done at once where there is room and nobody waits.

        It fails with NoPlace. Whoever gives up waiting calls `release`.
        """
        future: asyncio.Future[Chosen] = asyncio.get_running_loop().create_future()
        waiting = Waiting(job.call_id, job.key, job.model, job.cost, job.urgent)
        if not self._jobs:
            try:
                chosen = self._attempt(job, waiting)
            except NoPlace as error:
                future.set_exception(error)
                return future
            if chosen is not None:
                future.set_result(chosen)
                return future
        self.state, full = reservations.enqueue(self.state, waiting)
        if full is not None:
            message = (
                f"{full.waiting} calls of this key wait already"
                if full.whose == "key"
                else f"{full.waiting} calls wait already"
            )
            future.set_exception(
                NoPlace(429, "queue_full", f"{message}; try again later", self.retry_after())
            )
            return future
        self._jobs[job.call_id] = (job, future)
        self._pump(job.model)
        return future

    def take_now(self, job: Job) -> Chosen | None:
        """A route with room, held, for work that never waits (checks): None where there is none."""
        if self.waiting:
            return None
        try:
            return self._attempt(job)
        except NoPlace:
            return None

    def reachable(self, view: View, without: frozenset[str]) -> bool:
        """True when the model has a whole route without these nodes, if all others had room."""
        return planning.reachable(view, without)

    def repair(
        self,
        job: Job,
        stages: tuple[Stage, ...],
        failed: frozenset[str],
        numerics_class: str,
        engine: str,
        *,
        ask_only: bool = False,
    ) -> Chosen:
        """A route that goes on with what is left of `stages`; its room is held, the old route's given back.

        Raises NoPlace. Tries the given numerics class first, then any. `ask_only` takes nothing.
        """
        routing = self._routing_of(job.model)
        found = [view for view in self.views(job.model) if view.engine_version == engine]
        if not found:
            raise NoPlace(503, "no_route", f"no live node of {job.model!r} is left")
        view = found[0]
        mine = self.state.holds.get(job.call_id, {})
        full = {
            state.node_id
            for state in view.states
            if (state.node_id, job.model) not in mine
            and not job.need.within(reservations.room(self.state, (state.node_id, job.model)))
        }
        problem = ""
        for wanted in dict.fromkeys((numerics_class, "")):
            while True:
                candidates = set(view.addresses) - full - set(job.excluded)
                try:
                    decision = planning.substitute(
                        view,
                        stages,
                        failed,
                        routing,
                        candidates=candidates,
                        prompt_tokens=job.request.prompt_tokens,
                        numerics_class=wanted,
                    )
                except RoutingFailure as error:
                    problem = str(error)
                    break
                after, refused = self._hold(job, decision.route.stages)
                if refused is None:
                    if not ask_only:
                        self.state = after
                    return Chosen(decision.route.stages, view, self._named(decision.reason, view))
                full.add(refused.place[0])
        raise NoPlace(503, "no_route", problem, retry_after=1 if full else None)

    def release(self, call_id: str) -> None:
        """Gives back what a call holds, takes it out of the queue, and lets the next ones try."""
        waited = self._jobs.pop(call_id, None)
        if waited is not None and not waited[1].done():
            waited[1].cancel()
        needs = self.state.holds.get(call_id)
        if needs is not None:
            self._ended[call_id] = (self._roster.clock(), needs)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        before = self.state
        self.state = reservations.release(self.state, call_id)
        if self.state is not before and self._jobs:
            self.pump_soon()

    def took(self, seconds: float) -> None:
        """A call ended after so long: moves the estimate behind Retry-After."""
        self._average_s += DURATION_ALPHA * (seconds - self._average_s)

    def pump_soon(self) -> None:
        """Lets waiting calls try again, once what is happening now has happened."""
        if self._jobs and not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump_all)

    def _pump_all(self) -> None:
        self._pumping = False
        for model in list(self.state.lines):
            self._pump(model)

    def _pump(self, model: str) -> None:
        while (turn := reservations.head(self.state, model)) is not None:
            job, future = self._jobs[turn.call_id]
            try:
                chosen = self._attempt(job)
            except NoPlace as error:
                self._jobs.pop(job.call_id)
                self.state = reservations.leave(self.state, job.call_id)
                if not future.done():
                    future.set_exception(error)
                continue
            if chosen is None:
                return
            self._jobs.pop(job.call_id)
            if not future.done():
                future.set_result(chosen)

    def _attempt(self, job: Job, straight: Waiting | None = None) -> Chosen | None:
        """A route with room, held; None when waiting may help. Raises NoPlace when it does not.

        `straight`: the call's place in the queue, which it has not been put into, for nobody waits.
        """
        if job.forced:
            return self._forced(job, straight)
        problem: NoRouteAvailable | None = None
        busy = False
        for view in self.views(job.model):
            try:
                plan = self._choose(view, job)
            except NoRouteAvailable as error:
                problem = error
                if error.busy:
                    busy = True
                    if not self._fits_when_empty(view, job):
                        raise NoPlace(
                            400,
                            "too_large",
                            f"the call asks for {job.need.slots} sessions at once, more than "
                            "the mesh has; ask for a smaller n",
                        ) from error
                continue
            after, refused = self._grant(job, plan.route.stages, straight)
            if refused is not None:
                busy = True
                continue
            self.state = after
            return Chosen(plan.route.stages, view, self._named(plan.explanation.why, view))
        if busy:
            return None
        if problem is None:
            problem = NoRouteAvailable(job.model, None)
        raise NoPlace(503, "no_route", str(problem), retry_after=5) from problem

    def _choose(self, view: View, job: Job) -> Plan:
        distrusted = self._experience.distrusted()
        if distrusted:
            try:
                return self._plan(view, job, {**distrusted, **job.excluded})
            except NoRouteAvailable:
                # Better a route that is not trusted than none.
                pass
        return self._plan(view, job, job.excluded)

    def _plan(self, view: View, job: Job, excluded: Mapping[str, str]) -> Plan:
        """The router's answer, kept while nothing that it depends on changes: calls alike come in crowds."""
        room_of = self.room_of(job.model)
        full = frozenset(node_id for node_id in view.addresses if not job.need.within(room_of(node_id)))
        routing = self._routing_of(job.model)
        key = (
            id(view),
            routing,
            job.request,
            full,
            frozenset(excluded),
            frozenset(job.cached_tokens.items()),
        )
        kept = self._plans.get(key)
        if kept is not None and kept[0] is view:
            return kept[1]
        found = planning.choose(
            view,
            routing,
            job.request,
            full,
            excluded=excluded,
            cached_tokens=job.cached_tokens,
        )
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = (view, found)
        return found

    def _forced(self, job: Job, straight: Waiting | None) -> Chosen | None:
        nodes: list[Node] = []
        for name in job.forced:
            node = self._roster.find(name)
            if node is None:
                raise NoPlace(409, "unknown_node", f"there is no node {name!r} in the mesh")
            if not node.routable(self._roster.clock()):
                raise NoPlace(409, "node_unavailable", f"node {node.name!r} takes no calls now")
            nodes.append(node)
        views = [v for v in self.views(job.model) if all(n.node_id in v.addresses for n in nodes)]
        layers = views[0].layers if views else 0
        if not views:
            held = [s for n in nodes for s in n.shards if s.model == job.model]
            layers = held[0].model_layers if held else 0
            if not layers:
                raise NoPlace(409, "gap", f"none of the named nodes holds layers of {job.model!r}")
        try:
            stages = planning.forced(nodes, job.model, layers)
        except RouteRefused as error:
            raise NoPlace(409, "gap", error.message) from error
        if not views:
            raise NoPlace(409, "engine_version", "the named nodes run unlike engine versions")
        after, refused = self._grant(job, stages, straight)
        if refused is not None:
            return None
        self.state = after
        return Chosen(stages, views[0], "the route was forced by X-Meshnet-Nodes")

    def _named(self, text: str, view: View) -> str:
        """A router's sentence with the nodes' names in the place of their ids."""
        for node_id in view.addresses:
            text = text.replace(node_id, self._roster.name_of(node_id))
        return text

    def _fits_when_empty(self, view: View, job: Job) -> bool:
        """False when the call asks for more than any route has, even with nobody else there."""
        small = frozenset(
            node_id
            for node_id in view.addresses
            if (room := self.state.rooms.get((node_id, job.model))) is None or not job.need.within(room.total)
        )
        return planning.reachable(view, small)

    def _needs(self, job: Job, stages: tuple[Stage, ...]) -> reservations.Needs:
        nodes = [stage.node_id for stage in stages]
        return reservations.needs_of(nodes, job.model, job.need.slots, job.need.tokens)

    def _grant(
        self, job: Job, stages: tuple[Stage, ...], straight: Waiting | None
    ) -> tuple[reservations.State, reservations.NoRoom | None]:
        needs = self._needs(job, stages)
        if straight is not None:
            return reservations.straight(self.state, straight, needs)
        return reservations.grant(self.state, job.call_id, needs)

    def _hold(
        self, job: Job, stages: tuple[Stage, ...]
    ) -> tuple[reservations.State, reservations.NoRoom | None]:
        return reservations.hold(self.state, job.call_id, self._needs(job, stages))

    # ------------------------------------------------------------ what nodes announce

    def _node_changed(self, node_id: str, node: Node | None) -> None:
        before = self.state
        if node is None or not node.alive(self._roster.clock()):
            self.state = reservations.withdraw(self.state, node_id)
        else:
            self._announce(node)
        if self.state is not before:
            self.pump_soon()

    def _announce(self, node: Node) -> None:
        self._forget_ended()
        models = {shard.model for shard in node.shards if shard.usable}
        for model in models:
            shards = [shard for shard in node.shards if shard.model == model and shard.usable]
            slots = min(shard.n_slots for shard in shards)
            tokens = min(shard.n_slots * shard.n_ctx for shard in shards)
            busy = max(shard.n_slots - shard.free_slots for shard in shards)
            place = (node.node_id, model)
            ours = {
                call_id: needs[place].slots
                for shard in shards
                for call_id in shard.sessions
                if (needs := self._needs_of_known(call_id)) is not None and place in needs
            }
            self.state = reservations.announce(self.state, place, Need(slots, tokens), busy, ours)
        gone = [place for place in self.state.rooms if place[0] == node.node_id and place[1] not in models]
        for place in gone:
            self.state = reservations.close(self.state, place)

    def _needs_of_known(self, call_id: str) -> reservations.Needs | None:
        held = self.state.holds.get(call_id)
        if held is not None:
            return held
        ended = self._ended.get(call_id)
        return ended[1] if ended is not None else None

    def _forget_ended(self) -> None:
        limit = self._roster.clock() - REMEMBER_ENDED_S
        while self._ended:
            call_id, (at, _) = next(iter(self._ended.items()))
            if at >= limit:
                return
            del self._ended[call_id]
