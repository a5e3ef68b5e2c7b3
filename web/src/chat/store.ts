// Conversations in IndexedDB. What is loaded never carries a `streaming` mark: nothing writes to it any more.

import { DEFAULT_PARAMS, type Conversation, type Message } from './types';

const NAME = 'meshnet-chat';
const VERSION = 1;

function wait<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error('IndexedDB refused the request'));
  });
}

function finished(transaction: IDBTransaction): Promise<void> {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = () => reject(transaction.error ?? new Error('IndexedDB refused the transaction'));
    transaction.onabort = () => reject(transaction.error ?? new Error('IndexedDB aborted the transaction'));
  });
}

/** A message as it is after its page went away: an unfinished answer is an interrupted one. */
export function settled(message: Message): Message {
  if (message.streaming === undefined) return message;
  const { streaming: _, ...rest } = message;
  return { ...rest, ending: rest.ending ?? 'interrupted' };
}

export class ChatStore {
  private opened: Promise<IDBDatabase> | null = null;

  private open(): Promise<IDBDatabase> {
    this.opened ??= new Promise((resolve, reject) => {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        request.result.createObjectStore('conversations', { keyPath: 'id' });
        const messages = request.result.createObjectStore('messages', { keyPath: 'id' });
        messages.createIndex('conversation', 'conversation');
      };
      request.onsuccess = () => {
        // Another window wants a newer version: let go, and open anew at the next use.
        request.result.onversionchange = () => {
          request.result.close();
          this.opened = null;
        };
        resolve(request.result);
      };
      request.onerror = () => reject(request.error ?? new Error('IndexedDB cannot be opened'));
    });
    return this.opened;
  }

  /** All conversations, the last used first. */
  async conversations(): Promise<Conversation[]> {
    const db = await this.open();
    const all = await wait<Conversation[]>(db.transaction('conversations').objectStore('conversations').getAll());
    return all
      .map((conversation) => ({ ...conversation, params: { ...DEFAULT_PARAMS, ...conversation.params } }))
      .sort((a, b) => b.updated - a.updated);
  }

  async messages(conversation: string): Promise<Message[]> {
    const db = await this.open();
    const index = db.transaction('messages').objectStore('messages').index('conversation');
    const all = await wait<Message[]>(index.getAll(conversation));
    return all.map(settled).sort((a, b) => a.created - b.created);
  }

  /** Takes the marks out of the database too, once, when the page loads. Returns how many there were. */
  async stripStreaming(): Promise<number> {
    const db = await this.open();
    const transaction = db.transaction('messages', 'readwrite');
    let count = 0;
    const request = transaction.objectStore('messages').openCursor();
    request.onsuccess = () => {
      const cursor = request.result;
      if (cursor === null) return;
      const message = cursor.value as Message;
      if (message.streaming !== undefined) {
        cursor.update(settled(message));
        count += 1;
      }
      cursor.continue();
    };
    await finished(transaction);
    return count;
  }

  async saveConversation(conversation: Conversation): Promise<void> {
    const db = await this.open();
    const transaction = db.transaction('conversations', 'readwrite');
    transaction.objectStore('conversations').put(conversation);
    await finished(transaction);
  }

  async saveMessages(...messages: Message[]): Promise<void> {
    const db = await this.open();
    const transaction = db.transaction('messages', 'readwrite');
    for (const message of messages) transaction.objectStore('messages').put(message);
    await finished(transaction);
  }

  async deleteMessages(ids: Iterable<string>): Promise<void> {
    const db = await this.open();
    const transaction = db.transaction('messages', 'readwrite');
    for (const id of ids) transaction.objectStore('messages').delete(id);
    await finished(transaction);
  }

  async deleteConversation(id: string): Promise<void> {
    const db = await this.open();
    const transaction = db.transaction(['conversations', 'messages'], 'readwrite');
    transaction.objectStore('conversations').delete(id);
    const messages = transaction.objectStore('messages');
    const request = messages.index('conversation').getAllKeys(id);
    request.onsuccess = () => {
      for (const key of request.result) messages.delete(key);
    };
    await finished(transaction);
  }

  /** Ids of the conversations with a message that contains `text`, whatever its case. */
  async search(text: string): Promise<Set<string>> {
    const needle = text.toLowerCase();
    const db = await this.open();
    const transaction = db.transaction('messages');
    const found = new Set<string>();
    const request = transaction.objectStore('messages').openCursor();
    request.onsuccess = () => {
      const cursor = request.result;
      if (cursor === null) return;
      const message = cursor.value as Message;
      if (!found.has(message.conversation) && message.content.toLowerCase().includes(needle)) {
        found.add(message.conversation);
      }
      cursor.continue();
    };
    await finished(transaction);
    return found;
  }
}
