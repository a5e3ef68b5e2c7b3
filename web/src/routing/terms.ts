// From a plan's terms to stacked bars: the same kinds in the same order and colours for every candidate.

import type { PlanCandidate } from './types';

export interface Segment {
  kind: string;
  ms: number;
  colour: string;
}

/** The kinds of all candidates in the order in which the plan first names them. */
export function kindsOf(candidates: readonly PlanCandidate[]): string[] {
  return [...new Set(candidates.flatMap((candidate) => candidate.terms.map((term) => term.kind)))];
}

export function colourOf(kinds: readonly string[], kind: string): string {
  return `var(--term-${Math.min(Math.max(kinds.indexOf(kind), 0), 7)})`;
}

/** A candidate's terms added up by kind; kinds that cost nothing are left out. */
export function segmentsOf(candidate: PlanCandidate, kinds: readonly string[]): Segment[] {
  const sums = new Map<string, number>();
  for (const term of candidate.terms) sums.set(term.kind, (sums.get(term.kind) ?? 0) + term.ms);
  return kinds
    .filter((kind) => (sums.get(kind) ?? 0) > 0)
    .map((kind) => ({ kind, ms: sums.get(kind) ?? 0, colour: colourOf(kinds, kind) }));
}

export interface SplitVerdict {
  single: PlanCandidate | null;
  split: PlanCandidate | null;
}

/** The cheapest candidate on one node and the cheapest over several, as the plan priced them. */
export function splitVerdict(candidates: readonly PlanCandidate[]): SplitVerdict {
  const best = (several: boolean): PlanCandidate | null =>
    candidates
      .filter((candidate) => candidate.route.stages.length > 1 === several)
      .reduce<PlanCandidate | null>((a, b) => (a === null || b.total_ms < a.total_ms ? b : a), null);
  return { single: best(false), split: best(true) };
}
