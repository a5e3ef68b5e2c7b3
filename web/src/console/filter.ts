// Which lines of the console are shown.

import type { ConsoleEvent } from '../api/types';

export interface ConsoleFilter {
  text: string;
  level: '' | 'warning' | 'error';
  /** '' for all, 'proxy' for calls, 'node' for the mesh, or an event's exact name. */
  event: string;
}

export const NO_CONSOLE_FILTER: ConsoleFilter = { text: '', level: '', event: '' };

const RANK: Record<string, number> = { debug: 0, info: 1, warning: 2, warn: 2, error: 3, critical: 4 };

export function matches(entry: ConsoleEvent, filter: ConsoleFilter): boolean {
  if (filter.level !== '' && (RANK[entry.level ?? 'info'] ?? 1) < (RANK[filter.level] ?? 0)) return false;
  if (filter.event !== '' && entry.event !== filter.event && entry.event.split(' ')[0] !== filter.event) return false;
  const text = filter.text.trim().toLowerCase();
  return text === '' || `${entry.event} ${entry.line} ${entry.call_id ?? ''}`.toLowerCase().includes(text);
}

export function levelOf(entry: ConsoleEvent): 'info' | 'warning' | 'error' {
  const rank = RANK[entry.level ?? 'info'] ?? 1;
  return rank >= 3 ? 'error' : rank === 2 ? 'warning' : 'info';
}

/** The line without what stands in columns of its own: the event's name and the call's id. */
export function rest(entry: ConsoleEvent): string {
  let text = entry.line;
  if (text.startsWith(entry.event)) text = text.slice(entry.event.length);
  if (entry.call_id) text = text.replace(entry.call_id, '');
  return text.replace(/ {2,}/g, ' ').trim();
}
