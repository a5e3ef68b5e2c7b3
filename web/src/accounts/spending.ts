// Spending per day as the chart draws it: every day has a value, the largest keys have a series of their own.

import type { DaySpending } from './types';

const DAY_S = 86_400;
/** Keys with a series of their own; the others share the last one. */
export const MAX_SERIES = 6;

export interface SpendingSeries {
  /** Days as unix seconds at 00:00 UTC. */
  days: number[];
  names: string[];
  /** Micro-units per series and day. */
  values: number[][];
}

export function seriesOf(rows: readonly DaySpending[], days: number, now: number): SpendingSeries {
  const today = Math.floor(now / 1000 / DAY_S) * DAY_S;
  const axis = Array.from({ length: days }, (_, index) => today - (days - 1 - index) * DAY_S);
  const place = new Map(axis.map((day, index) => [day, index]));
  const totals = new Map<string, number>();
  const label = (row: DaySpending): string => `${row.account} / ${row.key}`;
  for (const row of rows) totals.set(label(row), (totals.get(label(row)) ?? 0) + row.charge);
  const ranked = [...totals.entries()].sort(([a, one], [b, two]) => two - one || (a < b ? -1 : 1)).map(([name]) => name);
  const named = ranked.length > MAX_SERIES ? ranked.slice(0, MAX_SERIES - 1) : ranked;
  const names = ranked.length > named.length ? [...named, 'other keys'] : named;
  const values = names.map(() => axis.map(() => 0));
  for (const row of rows) {
    const at = place.get(Date.parse(`${row.day}T00:00:00Z`) / 1000);
    const index = named.indexOf(label(row));
    const series = values[index < 0 ? names.length - 1 : index];
    if (at !== undefined && series !== undefined) series[at] = (series[at] ?? 0) + row.charge;
  }
  return { days: axis, names, values };
}

/** Series on top of each other, for bars that are drawn from the highest to the lowest. */
export function stacked(values: readonly number[][]): number[][] {
  const sums: number[][] = [];
  for (const series of values) {
    const below = sums.at(-1);
    sums.push(series.map((value, day) => value + (below?.[day] ?? 0)));
  }
  return sums;
}

export function total(rows: readonly DaySpending[]): number {
  return rows.reduce((sum, row) => sum + row.charge, 0);
}
