// Which calls stand where on the wall.

import type { Call } from '../api/types';

export interface CallFilter {
  text: string;
  outcome: '' | 'complete' | 'cancelled' | 'failed' | 'rerouted';
  model: string;
  key: string;
}

export const NO_FILTER: CallFilter = { text: '', outcome: '', model: '', key: '' };

/** Ended calls that the filter lets through, the last ended first. */
export function ended(calls: Iterable<Call>, filter: CallFilter): Call[] {
  const text = filter.text.trim().toLowerCase();
  return [...calls]
    .filter((call) => {
      if (filter.model !== '' && call.model !== filter.model) return false;
      if (filter.key !== '' && call.key !== filter.key) return false;
      if (filter.outcome === 'rerouted' ? !call.reroutes : filter.outcome !== '' && call.phase !== filter.outcome) return false;
      if (text === '') return true;
      const stages = call.stages.map((stage) => `${stage.name ?? ''} ${stage.node_id}`).join(' ');
      const said = `${call.id} ${call.request_id ?? ''} ${call.model} ${call.key ?? ''} ${stages} ${call.error?.message ?? ''} ${call.error?.code ?? ''}`;
      return said.toLowerCase().includes(text);
    })
    .sort((a, b) => (b.ended_ms ?? 0) - (a.ended_ms ?? 0) || (a.id < b.id ? 1 : -1));
}

export function distinct(values: Iterable<string | undefined>): string[] {
  return [...new Set([...values].filter((value): value is string => value !== undefined && value !== ''))].sort();
}
