// Numbers and times as the page writes them.

export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  return Math.round(value).toLocaleString('en-US');
}

export function decimal(value: number | null | undefined, digits = 1): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  return value.toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Milliseconds as a person reads them: 0.4 ms, 87 ms, 1.3 s, 4:05. */
export function duration(ms: number | null | undefined): string {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return '–';
  if (ms < 10) return `${decimal(ms, 1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${decimal(ms / 1000, 1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, '0')}`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : decimal(size, 1)} ${units[unit]}`;
}

/** Micro-units as units, exactly: money is whole micro-units and never goes through a fraction. */
export function money(micro: number | null | undefined): string {
  if (micro === null || micro === undefined || !Number.isFinite(micro)) return '–';
  const sign = micro < 0 ? '−' : '';
  const whole = Math.abs(Math.round(micro));
  const units = Math.floor(whole / 1_000_000).toLocaleString('en-US');
  const rest = String(whole % 1_000_000).padStart(6, '0').replace(/0{1,4}$/, '');
  return `${sign}${units}.${rest}`;
}

/** "2.5" -> 2500000; null when it is not an amount with at most six decimals. */
export function parseMoney(text: string): number | null {
  const match = /^\s*(-?)(\d{1,9})(?:\.(\d{1,6}))?\s*$/.exec(text);
  if (match === null) return null;
  const micro = Number(match[2]) * 1_000_000 + Number((match[3] ?? '').padEnd(6, '0'));
  return match[1] === '-' ? -micro : micro;
}

export function clock(ms: number): string {
  return new Date(ms).toLocaleTimeString('en-GB');
}

export function clockMillis(ms: number): string {
  return `${clock(ms)}.${String(Math.floor(ms) % 1000).padStart(3, '0')}`;
}

export function dateTime(ms: number | null | undefined): string {
  if (ms === null || ms === undefined) return '–';
  const date = new Date(ms);
  return `${date.toLocaleDateString('en-CA')} ${date.toLocaleTimeString('en-GB')}`;
}

export function layers(first: number, last: number): string {
  return first === last ? `${first}` : `${first}–${last}`;
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** Enough of an id to tell it from its neighbours. */
export function shortId(id: string): string {
  return id.length > 14 ? `${id.slice(0, 13)}…` : id;
}
