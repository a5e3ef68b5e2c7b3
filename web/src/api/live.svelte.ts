// The one event stream that feeds every tab: a snapshot, then deltas, applied once per animation frame.

import { flushSync } from 'svelte';
import { SvelteMap } from 'svelte/reactivity';
import { reportStatus } from './client';
import { readSse, type SseEvent } from './sse';
import { ENDED, type Call, type ConsoleEvent, type MeshNode, type Model, type Remove, type Snapshot, type Upsert } from './types';

/** Entries of the console that are kept, as many as the tracker's ring holds. */
export const CONSOLE_LIMIT = 2000;
/** Nothing heard for this long (comments come every 10 s): the connection is dead though still open. */
const SILENCE_MS = 25_000;
/** A page that nobody has looked at for this long gives its connection back until it is seen again. */
const HIDDEN_MS = 60_000;
const RETRY_MS = [300, 700, 1500, 3000, 5000];

/** Milliseconds of a frame that changes may take, with what they do to the page; a burst goes on in the next. */
const BUDGET_MS = 4;
/** Calls, nodes and models that change on the page before the clock is looked at again. */
const BATCH = 2;
/** Calls that are kept; the ones that ended first are forgotten first. */
const CALL_LIMIT = 1000;

export class Live {
  calls = new SvelteMap<string, Call>();
  /** Calls in flight, the oldest first; another list only when one begins or ends. */
  flying = $state.raw<readonly string[]>([]);
  /** Calls that ended, in no order; another list only when one of them changes. */
  over = $state.raw<readonly Call[]>([]);
  /** Tokens per second of all calls in flight. */
  rate = $state(0);
  nodes = new SvelteMap<string, MeshNode>();
  models = new SvelteMap<string, Model>();
  console = $state.raw<ConsoleEvent[]>([]);
  /** connecting: first try; open: events flow; broken: lost, and being tried again. */
  state = $state<'off' | 'connecting' | 'open' | 'broken'>('off');

  private snapshot: Snapshot | null = null;
  private readonly changes = new Map<string, Upsert | Remove>();
  private scheduled = false;
  private lastId = '';
  private abort: AbortController | null = null;
  private tries = 0;
  private heard = 0;
  private watch: ReturnType<typeof setInterval> | undefined;
  private hiddenTimer: ReturnType<typeof setTimeout> | undefined;
  private retryTimer: ReturnType<typeof setTimeout> | undefined;

  start(): void {
    if (this.abort !== null) return;
    this.state = 'connecting';
    document.addEventListener('visibilitychange', this.onVisibility);
    window.addEventListener('online', this.retryNow);
    this.watch = setInterval(() => {
      if (this.state === 'open' && performance.now() - this.heard > SILENCE_MS) this.drop();
    }, 5000);
    void this.connect();
  }

  stop(): void {
    document.removeEventListener('visibilitychange', this.onVisibility);
    window.removeEventListener('online', this.retryNow);
    clearInterval(this.watch);
    clearTimeout(this.hiddenTimer);
    clearTimeout(this.retryTimer);
    this.abort?.abort();
    this.abort = null;
    this.state = 'off';
    this.lastId = '';
    this.snapshot = null;
    this.changes.clear();
    this.calls.clear();
    this.flying = [];
    this.over = [];
    this.rate = 0;
    this.nodes.clear();
    this.models.clear();
    this.console = [];
  }

  /** Takes one event of the stream; the page changes with the next frame. */
  take(event: SseEvent): void {
    if (event.event === 'snapshot') {
      this.snapshot = JSON.parse(event.data) as Snapshot;
      this.changes.clear();
    } else if (event.event === 'upsert') {
      const { kind, value } = JSON.parse(event.data) as Upsert;
      // Only the last state of a thing is worth drawing, so what waits is bounded by how many things there are.
      this.changes.set(`${kind}:${idOf(kind, value)}`, { kind, value } as Upsert);
    } else if (event.event === 'remove') {
      const { kind, id } = JSON.parse(event.data) as Remove;
      this.changes.set(`${kind}:${id}`, { kind, id });
    }
    if (event.id !== '') this.lastId = event.id;
    this.schedule();
  }

  retryNow = (): void => {
    if (this.state === 'open' || this.state === 'off') return;
    clearTimeout(this.retryTimer);
    this.tries = 0;
    void this.connect();
  };

  private onVisibility = (): void => {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => {
        this.abort?.abort();
      }, HIDDEN_MS);
    } else {
      this.retryNow();
    }
  };

  private drop(): void {
    this.abort?.abort();
  }

  private async connect(): Promise<void> {
    this.abort?.abort();
    const abort = new AbortController();
    this.abort = abort;
    let status = 0;
    try {
      const response = await fetch('/api/events', {
        credentials: 'same-origin',
        cache: 'no-store',
        headers: this.lastId === '' ? {} : { 'Last-Event-ID': this.lastId },
        signal: abort.signal,
      });
      status = response.status;
      if (!response.ok || response.body === null) {
        reportStatus(response.status);
        throw new Error(`the event stream answered ${response.status}`);
      }
      this.heard = performance.now();
      await readSse(response.body, (items) => {
        if (this.abort !== abort) return;
        this.heard = performance.now();
        this.tries = 0;
        this.state = 'open';
        for (const event of items.events) this.take(event);
      });
    } catch {
      // Whatever broke it, the answer is the same: say so, wait, try again.
    }
    if (this.abort !== abort || status === 401) return;
    // Not even an answer: it may be a new tracker that counts from the start, so ask for a snapshot.
    if (status === 0) this.lastId = '';
    if (document.hidden && abort.signal.aborted) {
      this.state = 'connecting';
      return;
    }
    this.state = 'broken';
    const wait = RETRY_MS[Math.min(this.tries, RETRY_MS.length - 1)] ?? 5000;
    this.tries += 1;
    this.retryTimer = setTimeout(() => void this.connect(), wait);
  }

  private schedule(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    const flush = (): void => {
      this.scheduled = false;
      this.flush();
    };
    // Hidden pages get no animation frames.
    if (document.hidden) setTimeout(flush, 500);
    else requestAnimationFrame(flush);
  }

  /** Applies what waits for as long as a frame may take, so that a burst is drawn over several frames. */
  flush(budget = document.hidden ? Infinity : BUDGET_MS): void {
    const until = performance.now() + budget;
    do {
      this.apply(budget === Infinity ? Infinity : BATCH);
      flushSync();
    } while (this.changes.size > 0 && performance.now() < until);
    if (this.changes.size > 0) this.schedule();
  }

  private apply(limit: number): void {
    const lines = new Map<number, ConsoleEvent>();
    const gone = new Set<number>();
    let ring: readonly ConsoleEvent[] = this.console;
    let left = limit;
    let moved = this.snapshot !== null; // a call began, went on or ended
    let ended = moved;
    if (this.snapshot !== null) {
      replace(this.calls, this.snapshot.calls, (call) => call.id);
      replace(this.nodes, this.snapshot.nodes, (node) => node.node_id);
      replace(this.models, this.snapshot.models, (model) => model.id);
      ring = this.snapshot.console ?? [];
      this.console = [...ring];
      this.snapshot = null;
    }
    for (const [key, change] of this.changes) {
      if (left <= 0) break;
      this.changes.delete(key);
      left -= change.kind === 'console' ? 0.2 : 1;
      if ('value' in change) {
        if (change.kind === 'call') {
          this.calls.set(change.value.id, change.value);
          moved = true;
          ended ||= ENDED.has(change.value.phase);
        } else if (change.kind === 'node') this.nodes.set(change.value.node_id, change.value);
        else if (change.kind === 'model') this.models.set(change.value.id, change.value);
        else lines.set(change.value.seq, change.value);
      } else if (change.kind === 'call') {
        this.calls.delete(String(change.id));
        moved = ended = true;
      } else if (change.kind === 'node') this.nodes.delete(String(change.id));
      else if (change.kind === 'model') this.models.delete(String(change.id));
      else gone.add(Number(change.id));
    }
    if (lines.size > 0 || gone.size > 0) this.console = mergeConsole(ring, lines, gone);
    if (this.calls.size > CALL_LIMIT) this.forgetCalls();
    if (moved) this.sumUp(ended);
  }

  /** What the lists of calls need, once per frame: a reader of `calls` as a whole pays for each change of each. */
  private sumUp(ended: boolean): void {
    const flying: Call[] = [];
    const over: Call[] = [];
    for (const call of this.calls.values()) (ENDED.has(call.phase) ? over : flying).push(call);
    flying.sort((a, b) => a.accepted_ms - b.accepted_ms || (a.id < b.id ? -1 : 1));
    const before = this.flying;
    if (flying.length !== before.length || flying.some((call, at) => call.id !== before[at])) {
      this.flying = flying.map((call) => call.id);
    }
    if (ended) this.over = over;
    this.rate = flying.reduce((sum, call) => sum + (call.tokens_per_second ?? 0), 0);
  }

  private forgetCalls(): void {
    const ended = [...this.calls.values()].filter((call) => ENDED.has(call.phase));
    ended.sort((a, b) => (a.ended_ms ?? 0) - (b.ended_ms ?? 0));
    for (const call of ended.slice(0, this.calls.size - CALL_LIMIT)) this.calls.delete(call.id);
  }
}

function idOf(kind: Upsert['kind'], value: Upsert['value']): string | number {
  if (kind === 'console') return (value as ConsoleEvent).seq;
  if (kind === 'node') return (value as MeshNode).node_id;
  return (value as Call | Model).id;
}

function replace<T>(map: SvelteMap<string, T>, values: T[] | undefined, key: (value: T) => string): void {
  const seen = new Set<string>();
  for (const value of values ?? []) {
    seen.add(key(value));
    map.set(key(value), value);
  }
  for (const id of [...map.keys()]) if (!seen.has(id)) map.delete(id);
}

/** The ring after updates in place (same seq), additions in order of seq, and removals. */
export function mergeConsole(
  ring: readonly ConsoleEvent[],
  lines: ReadonlyMap<number, ConsoleEvent>,
  gone: ReadonlySet<number> = new Set(),
): ConsoleEvent[] {
  const left = new Map(lines);
  const merged: ConsoleEvent[] = [];
  for (const entry of ring) {
    if (gone.has(entry.seq)) continue;
    merged.push(left.get(entry.seq) ?? entry);
    left.delete(entry.seq);
  }
  if (left.size > 0) {
    merged.push(...left.values());
    merged.sort((a, b) => a.seq - b.seq);
  }
  return merged.length > CONSOLE_LIMIT ? merged.slice(-CONSOLE_LIMIT) : merged;
}

export const live = new Live();
