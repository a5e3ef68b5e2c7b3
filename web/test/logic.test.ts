// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';
import { seriesOf, stacked } from '../src/accounts/spending';
import type { DaySpending } from '../src/accounts/types';
import type { Call, MeshNode } from '../src/api/types';
import { withNames } from '../src/base/nodes.svelte';
import { bytes, duration, money, parseMoney } from '../src/base/format';
import { ended, NO_FILTER } from '../src/calls/list';
import { describe as describeDetail } from '../src/calls/timeline';
import { matches, NO_CONSOLE_FILTER, rest } from '../src/console/filter';
import { barsOf, frameOf, routesOf, rowsOf, ticks, xOf } from '../src/mesh/picture';
import { kindsOf, segmentsOf, splitVerdict } from '../src/routing/terms';
import type { PlanCandidate } from '../src/routing/types';
import { addressOf, parsePlace } from '../src/shell/router.svelte';

describe('numbers', () => {
  it('money is exact', () => {
    expect([0, 42, 1_000_000, 12_345_678, -3_950_001, 1_234_567_890_000].map(money)).toEqual([
      '0.00', '0.000042', '1.00', '12.345678', '−3.950001', '1,234,567.89',
    ]);
    expect(['12.5', '-3', '0.000001', '1.1234567', 'x', ''].map(parseMoney)).toEqual([
      12_500_000, -3_000_000, 1, null, null, null,
    ]);
  });

  it('times and sizes are short', () => {
    expect([0.42, 87, 1300, 245_000, 3_700_000, null].map(duration)).toEqual(['0.4 ms', '87 ms', '1.3 s', '4:05', '1 h 1 min', '–']);
    expect([0, 999, 98_000_000, 12_300_000_000].map(bytes)).toEqual(['0 B', '999 B', '98.0 MB', '12.3 GB']);
  });
});

describe('addresses', () => {
  it('are read and written', () => {
    expect(parsePlace('/dashboard')).toEqual({ tab: null, id: null });
    expect(parsePlace('/dashboard/calls/c%2F1')).toEqual({ tab: 'calls', id: 'c/1' });
    expect(parsePlace('/dashboard/nowhere')).toEqual({ tab: null, id: null });
    expect(parsePlace(addressOf('chat', 'a b'))).toEqual({ tab: 'chat', id: 'a b' });
  });
});

describe('the wall', () => {
  const base = { model: 'm', stages: [], output_tokens: 0 };
  const calls: Call[] = [
    { ...base, id: 'done', phase: 'complete', accepted_ms: 2, ended_ms: 5, key: 'home', reroutes: 1 },
    { ...base, id: 'bad', phase: 'failed', accepted_ms: 3, ended_ms: 8, error: { code: 'route_lost', message: 'attic lost' } },
  ];

  it('has ended calls, the last first, as the filters let them through', () => {
    expect(ended(calls, NO_FILTER).map(({ id }) => id)).toEqual(['bad', 'done']);
    expect(ended(calls, { ...NO_FILTER, outcome: 'rerouted' }).map(({ id }) => id)).toEqual(['done']);
    expect(ended(calls, { ...NO_FILTER, text: 'ATTIC' }).map(({ id }) => id)).toEqual(['bad']);
    expect(ended(calls, { ...NO_FILTER, key: 'home', outcome: 'failed' })).toEqual([]);
  });

  it('writes the details of a timeline as text', () => {
    expect(describeDetail({ stages: [{ name: 'attic', start_layer: 0, end_layer: 14 }], ms: 1.234, why: null })).toBe(
      'stages attic [0–14], ms 1.23',
    );
  });
});

describe('the picture', () => {
  const shard = (start: number, end: number, state = 'ready') => ({ model: 'm', start_layer: start, end_layer: end, state });
  const node = (id: string, ...shards: ReturnType<typeof shard>[]): MeshNode => ({
    node_id: id, name: id, ready: true, alive: true, state: 'ready', served_layers: [], shards, latency_ms: 0, current_load: 0, capacity_score: 1,
  });
  const nodes = [node('tail', shard(15, 29)), node('head', shard(0, 14)), node('other', { ...shard(0, 3), model: 'x' })];
  const rows = rowsOf(nodes, 'm');
  const frame = frameOf(1012, 30, rows.length);

  it('has a row for each node of the model, the head first', () => {
    expect(rows.map(({ node_id }) => node_id)).toEqual(['head', 'tail']);
  });

  it('places bars by their layers, side by side', () => {
    const head = barsOf(frame, rows[0] as MeshNode, 'm', 0)[0];
    const tail = barsOf(frame, rows[1] as MeshNode, 'm', 1)[0];
    expect(head?.x).toBe(frame.labelWidth + 1);
    expect((head?.x ?? 0) + (head?.width ?? 0)).toBeLessThan(tail?.x ?? 0);
    expect((tail?.x ?? 0) + (tail?.width ?? 0)).toBeLessThanOrEqual(frame.width);
    expect(xOf(frame, 30)).toBe(frame.width);
  });

  it('groups live routes, and draws none through a node that it does not show', () => {
    const stage = (id: string, start: number, end: number) => ({ node_id: id, start_layer: start, end_layer: end });
    const live = (id: string, ...stages: ReturnType<typeof stage>[]): Call => ({ id, model: 'm', phase: 'generating', stages, output_tokens: 0, accepted_ms: 0 });
    const split = [stage('head', 0, 14), stage('tail', 15, 29)];
    const found = routesOf(frame, rows, [live('a', ...split), live('b', ...split), live('c', stage('gone', 0, 29)), { ...live('d', ...split), phase: 'complete' }], 'm');
    expect(found).toHaveLength(1);
    expect(found[0]).toMatchObject({ calls: 2 });
    expect(found[0]?.path).toMatch(/^M[\d.]+ [\d.]+L.*C.*L/);
  });

  it('writes numbers that have room', () => {
    expect(ticks(frameOf(360, 30, 1))).toEqual([0, 5, 10, 15, 20, 25]);
    expect(ticks(frameOf(1012, 80, 1)).length).toBeLessThan(22);
  });
});

describe('routing', () => {
  const candidate = (total: number, stages: number, terms: [string, number][]): PlanCandidate => ({
    roles: [], total_ms: total, totals: {}, terms: terms.map(([kind, ms]) => ({ kind, about: '', ms })),
    route: { model: 'm', window: null, node_ids: [], hops: stages - 1, cost_ms: total, stages: Array.from({ length: stages }, () => ({ node_id: 'n', start_layer: 0, end_layer: 1 })) },
  });
  const candidates = [candidate(10, 2, [['queue', 1], ['decode', 4], ['decode', 5]]), candidate(12, 1, [['decode', 12], ['queue', 0]])];

  it('adds the terms up by kind, in one order', () => {
    const kinds = kindsOf(candidates);
    expect(kinds).toEqual(['queue', 'decode']);
    expect(segmentsOf(candidates[0] as PlanCandidate, kinds).map(({ kind, ms }) => [kind, ms])).toEqual([['queue', 1], ['decode', 9]]);
    expect(segmentsOf(candidates[1] as PlanCandidate, kinds).map(({ kind }) => kind)).toEqual(['decode']);
  });

  it('compares one node with several', () => {
    const { single, split } = splitVerdict(candidates);
    expect([single?.total_ms, split?.total_ms]).toEqual([12, 10]);
    expect(splitVerdict([]).single).toBeNull();
  });

  it('writes names for ids', () => {
    expect(withNames('n1 (0-14) -> n2 (15-29)', [{ node_id: 'n1', name: 'attic' }, { node_id: 'n2', name: 'cellar' }])).toBe('attic (0-14) -> cellar (15-29)');
  });
});

it('the console filters by level, event and text', () => {
  const entry = { seq: 1, ms: 0, level: 'warning', event: 'proxy rerouted', line: 'attic lost', call_id: 'c1' };
  expect(matches(entry, NO_CONSOLE_FILTER)).toBe(true);
  expect(matches(entry, { ...NO_CONSOLE_FILTER, level: 'error' })).toBe(false);
  expect(matches(entry, { ...NO_CONSOLE_FILTER, event: 'proxy', text: 'ATTIC' })).toBe(true);
  expect(matches(entry, { ...NO_CONSOLE_FILTER, event: 'node' })).toBe(false);
});

it('the console does not say twice what has a column of its own', () => {
  const entry = { seq: 1, ms: 0, event: 'proxy connected', line: 'proxy connected call-1 to node-1', call_id: 'call-1' };
  expect(rest(entry)).toBe('to node-1');
  expect(rest({ ...entry, line: 'something else', call_id: null })).toBe('something else');
});

describe('spending', () => {
  const row = (day: string, key: string, charge: number): DaySpending => ({ day, account: 'home', key_id: 1, key, calls: 1, prompt_tokens: 1, output_tokens: 1, charge });

  it('has every day, and stacks keys', () => {
    const now = Date.parse('2026-11-30T12:00:00Z');
    const { days, names, values } = seriesOf([row('2026-11-29', 'a', 5), row('2026-11-30', 'b', 7), row('2026-11-30', 'a', 1)], 3, now);
    expect(days.map((day) => new Date(day * 1000).toISOString().slice(0, 10))).toEqual(['2026-11-28', '2026-11-29', '2026-11-30']);
    expect(names).toEqual(['home / b', 'home / a']);
    expect(values).toEqual([[0, 0, 7], [0, 5, 1]]);
    expect(stacked(values)).toEqual([[0, 0, 7], [0, 5, 8]]);
  });

  it('puts the small keys together', () => {
    const rows = Array.from({ length: 9 }, (_, index) => row('2026-11-30', `k${index}`, 100 - index));
    const { names, values } = seriesOf(rows, 1, Date.parse('2026-11-30T12:00:00Z'));
    expect(names).toHaveLength(6);
    expect(names.at(-1)).toBe('other keys');
    expect(values.flat().reduce((sum, value) => sum + value, 0)).toBe(rows.reduce((sum, item) => sum + item.charge, 0));
  });
});
