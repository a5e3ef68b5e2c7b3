// What the browser keeps of a chat. Messages form a tree: an edit or a new answer is a sibling, nothing is lost.

import type { Stage } from '../api/types';

/** Sampling parameters of a conversation; what is null is not sent and the tracker's default holds. */
export interface Params {
  temperature: number | null;
  top_p: number | null;
  top_k: number | null;
  min_p: number | null;
  max_tokens: number | null;
  seed: number | null;
  presence_penalty: number | null;
  frequency_penalty: number | null;
  repeat_penalty: number | null;
  stop: string[];
  stream: boolean;
}

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  model: string | null;
  system: string;
  params: Params;
  /** The message that the shown branch ends with. */
  leaf: string | null;
}

export interface AnswerError {
  message: string;
  code: string;
}

export interface AnswerStats {
  tokens: number;
  prompt_tokens: number | null;
  tokens_per_second: number | null;
  ttft_ms: number | null;
  stages: Stage[];
  reroutes: number;
  numerics_changed: boolean;
}

/** How an answer ended when it did not end by itself. */
export type Ending = 'stopped' | 'cut' | 'interrupted';

export interface Message {
  id: string;
  conversation: string;
  parent: string | null;
  role: 'user' | 'assistant';
  content: string;
  created: number;
  model?: string;
  call?: string;
  finish?: string;
  ending?: Ending;
  error?: AnswerError;
  stats?: AnswerStats;
  /** Set while the answer is being written; stripped from everything that is loaded. */
  streaming?: true;
}

export const DEFAULT_PARAMS: Params = {
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  max_tokens: null,
  seed: null,
  presence_penalty: null,
  frequency_penalty: null,
  repeat_penalty: null,
  stop: [],
  stream: true,
};
