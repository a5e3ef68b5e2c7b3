// The tracker's values as docs/api.md names them. Times end in _ms, money in _micro.

export interface Stage {
  node_id: string;
  name?: string;
  start_layer: number;
  end_layer: number;
  compute_ms?: number;
  queue_ms?: number;
  link_ms?: number;
  tokens?: number;
}

export type Phase =
  | 'accepted'
  | 'queued'
  | 'route_selected'
  | 'connected'
  | 'prefill'
  | 'generating'
  | 'complete'
  | 'cancelled'
  | 'failed';

export interface TimelineEntry {
  ms: number;
  event: string;
  detail?: Record<string, unknown>;
}

export interface Call {
  id: string;
  request_id?: string;
  model: string;
  key?: string;
  kind?: 'chat' | 'completion';
  stream?: boolean;
  phase: Phase;
  stages: Stage[];
  prompt_tokens?: number;
  prefill_done?: number;
  output_tokens: number;
  tokens_per_second?: number | null;
  ttft_ms?: number | null;
  queue_position?: number | null;
  accepted_ms: number;
  /** The other tracker of the mesh that runs it, by address. */
  tracker?: string | null;
  ended_ms?: number | null;
  elapsed_ms?: number;
  finish_reason?: string | null;
  error?: { code: string; message: string } | null;
  reroutes?: number;
  degraded?: boolean;
  numerics_changed?: boolean;
  timeline?: TimelineEntry[];
}

export interface Shard {
  model: string;
  fingerprint?: string;
  start_layer: number;
  end_layer: number;
  model_layers?: number;
  entry_layers?: number[];
  state?: string;
  progress?: number | null;
  free_slots?: number;
  n_slots?: number;
  n_ctx?: number;
  memory_bytes?: number;
  /** While its bytes are on their way to the node. */
  fetch?: { done_bytes: number; total_bytes: number; bytes_per_s: number; source: string } | null;
  times?: Record<string, number>;
}

export type NodeStateName = 'joining' | 'loading' | 'ready' | 'draining' | 'suspect' | 'lost';

export interface MeshNode {
  node_id: string;
  name: string;
  ready: boolean;
  alive: boolean;
  state: NodeStateName;
  hardware?: { name?: string; os?: string; cores?: number; memory_bytes?: number; device?: string };
  http_url?: string;
  grpc_address?: string;
  served_layers: [number, number][];
  shards: Shard[];
  latency_ms: number;
  current_load: number;
  capacity_score: number;
  memory_free_bytes?: number;
  memory_limit_bytes?: number;
  numerics_class?: string;
  versions?: { meshnet?: string; engine?: string };
  /** 0 to 1. */
  trust?: number;
  served_requests?: number;
  failed_requests?: number;
  joined_ms?: number;
  last_seen_ms?: number;
  problems?: string[];
}

export interface Model {
  id: string;
  name?: string;
  aliases?: string[];
  fingerprint?: string;
  arch?: string;
  layers: number;
  n_ctx?: number;
  quantisation?: string;
  bytes?: number;
  complete: boolean;
  gaps: [number, number][];
  replicas: number[];
  tools?: boolean;
  cost_model?: 'measured' | 'weighted';
  default?: boolean;
  fill_command?: string | null;
}

/** What the mesh is asked to serve, and what the tracker has nodes do for it now. */
export interface Placement {
  models: {
    id: string;
    state: 'reading' | 'placing' | 'loading' | 'ready' | 'waiting' | 'evicted' | 'off' | 'incomplete' | 'failed';
    asked: boolean;
    progress: number;
    reason: string | null;
    why: string[];
  }[];
  moves: { node: string; action: 'load' | 'unload'; model: string; layers: [number, number] }[];
  default: string;
  aliases: Record<string, string>;
}

export interface ConsoleEvent {
  seq: number;
  ms: number;
  level?: string;
  event: string;
  call_id?: string | null;
  line: string;
}

export interface Snapshot {
  calls: Call[];
  nodes: MeshNode[];
  models: Model[];
  console: ConsoleEvent[];
  seq?: number;
}

export type Upsert =
  | { kind: 'call'; value: Call }
  | { kind: 'node'; value: MeshNode }
  | { kind: 'model'; value: Model }
  | { kind: 'console'; value: ConsoleEvent };

export interface Remove {
  kind: 'call' | 'node' | 'model' | 'console';
  id: string | number;
}

export interface Who {
  scope: 'use' | 'admin';
  name: string;
}

export const ENDED: ReadonlySet<Phase> = new Set<Phase>(['complete', 'cancelled', 'failed']);

/** What the wall calls a phase: everything between the queue and the end is processing. */
export function wallPhase(phase: Phase): 'queued' | 'processing' | 'complete' | 'cancelled' | 'failed' {
  if (phase === 'accepted' || phase === 'queued') return 'queued';
  if (phase === 'complete' || phase === 'cancelled' || phase === 'failed') return phase;
  return 'processing';
}
