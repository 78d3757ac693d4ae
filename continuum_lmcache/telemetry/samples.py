"""An engine's histogram samples since its last report, bounded also without reports."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from continuum_lmcache.telemetry import events
from continuum_lmcache.types import Retention

MOST_SAMPLES = 2_000  # kept until the next report; a step ends far fewer turns
NO_PIN = "-no-pin"  # after the reason of a TTL of 0

Samples = dict[str, list[float]]  # by label


@dataclass(slots=True)
class MetricSamples:
    """Samples by metric (prometheus.py names them)."""

    decisions: Counter[str] = field(default_factory=Counter)  # by the reason of the TTL, since the start
    places: Counter[str] = field(default_factory=Counter)  # starts, waits, and places kept, by reason
    lost_tokens: Counter[str] = field(default_factory=Counter)  # by cause and third, since the start
    _samples: dict[str, deque[tuple[str, float]]] = field(default_factory=dict)

    def add(self, event: events.Event) -> None:
        match event:
            case events.TurnArrived() if event.gap_s is not None:
                self._add("tool_gap_seconds", "", event.gap_s)
            case events.TurnStarted(resumed=False):
                self._add("queue_delay_seconds", "lost" if event.evicted else "kept", event.queue_delay_s)
            case events.TurnFinished(retention=Retention() as keep):
                self._add("ttl_seconds", "", keep.ttl_s)
                self.decisions[keep.reason if keep.ttl_s > 0 else keep.reason + NO_PIN] += 1
                if (place := event.place) is not None and place.reason:
                    self.places[f"{'kept' if place.is_kept else 'given-up'}-{place.reason}"] += 1
            case events.ProgramAdmitted(start=start):
                self.places[f"started-{start.reason}"] += 1
            case events.ProgramHeld(start=start):
                self.places[f"held-{start.reason}"] += 1
            case events.PrefixLost(loss=loss):
                self.lost_tokens[f"{loss.cause.value}-{loss.third}-third"] += loss.tokens

    def take_samples(self) -> dict[str, Samples]:
        """The samples since the last call, by metric and label."""
        found: dict[str, Samples] = {}
        for metric, samples in self._samples.items():
            for label, value in samples:
                found.setdefault(metric, {}).setdefault(label, []).append(value)
        self._samples.clear()
        return found

    def _add(self, metric: str, label: str, value: float) -> None:
        self._samples.setdefault(metric, deque(maxlen=MOST_SAMPLES)).append((label, value))
