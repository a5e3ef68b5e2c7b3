// Who is signed in. A key is exchanged once for a cookie that scripts cannot read; it is kept nowhere here.

import { api, ApiError, messageOf, whenUnauthorised } from './client';
import type { Who } from './types';

class Session {
  state = $state<'unknown' | 'out' | 'in'>('unknown');
  who = $state<Who | null>(null);
  error = $state('');

  get admin(): boolean {
    return this.who?.scope === 'admin';
  }

  /** Takes the key of a sign-in link if there is one, else asks the tracker about the cookie. */
  async start(linkKey: string | null): Promise<void> {
    whenUnauthorised(() => this.expired());
    if (linkKey !== null) {
      await this.signIn(linkKey);
      if (this.state === 'in') return;
    }
    try {
      this.enter(await api<Who>('GET', '/api/session', undefined, { quiet401: true }));
    } catch (error) {
      this.state = 'out';
      if (this.error === '' && !(error instanceof ApiError && error.status === 401)) {
        this.error = messageOf(error);
      }
    }
  }

  async signIn(key: string): Promise<void> {
    this.error = '';
    try {
      this.enter(await api<Who>('POST', '/api/session', { key }, { quiet401: true }));
    } catch (error) {
      this.state = 'out';
      this.error = messageOf(error);
    }
  }

  async signOut(): Promise<void> {
    try {
      await api('DELETE', '/api/session', undefined, { quiet401: true });
    } finally {
      this.who = null;
      this.state = 'out';
    }
  }

  private enter(who: Who): void {
    this.who = who;
    this.error = '';
    this.state = 'in';
  }

  private expired(): void {
    if (this.state !== 'in') return;
    this.who = null;
    this.state = 'out';
    this.error = 'The key of this session is no longer valid. Sign in again.';
  }
}

export const session = new Session();

/** Reads `#key=…` and takes it out of the address and the history before anything else happens. */
export function takeLinkKey(): string | null {
  const match = /^#key=(.+)$/.exec(location.hash);
  if (match === null) return null;
  history.replaceState(history.state, '', location.pathname + location.search);
  return decodeURIComponent(match[1] ?? '');
}
