// The books' values (docs/books.md). Money in micro-units, times in unix milliseconds.

export interface Account {
  id: number;
  name: string;
  unlimited: boolean;
  balance: number;
  held: number;
  created_at: number;
}

export interface Key {
  id: number;
  name: string;
  account_id: number;
  account: string;
  scope: 'use' | 'admin';
  created_at: number;
  monthly_budget: number | null;
  total_budget: number | null;
  requests_per_minute: number | null;
  tokens_per_minute: number | null;
  models: string[] | null;
  expires_at: number | null;
  revoked_at: number | null;
  last_used_at: number | null;
}

export interface DaySpending {
  day: string;
  account: string;
  key_id: number;
  key: string;
  calls: number;
  prompt_tokens: number;
  output_tokens: number;
  charge: number;
}

export interface Own {
  key: Key;
  unlimited: boolean;
  balance: number;
  held: number;
  spent_this_month: number;
  spent_in_all: number;
  spending: DaySpending[];
}

export interface Entry {
  id: number;
  at: number;
  call_id: string | null;
  kind: string;
  line: number;
  part: string;
  source: string;
  target: string;
  amount: number;
  why: string | null;
  reference: string | null;
}

export interface CallLedger {
  id: string;
  account: string;
  key: string;
  model: string;
  status: 'open' | 'held' | 'settled' | 'released' | 'refunded';
  outcome: string | null;
  reason: string | null;
  price_input: number;
  price_output: number;
  mesh_share: number;
  reserved: number;
  charge: number;
  prompt_tokens: number;
  output_tokens: number;
  accepted_at: number;
  ended_at: number | null;
  work: { node_id: string; layers: number; prefill_tokens: number; decode_tokens: number }[];
  entries: Entry[];
}

export interface Suspect {
  call_id: string;
  cause: string;
  model: string;
  route: string[];
  reason: string;
  opened_at: number;
  state: string;
  attempts: number;
  closed_at: number | null;
  checks: { cause: string; nodes: string[]; passed: boolean; worst_gap: number; detail: string; at: number }[];
}

export interface Earning {
  node_id: string;
  calls: number;
  prefill_units: number;
  decode_units: number;
  earned: number;
}
